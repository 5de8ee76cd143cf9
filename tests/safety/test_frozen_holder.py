"""A holder frozen past its ttl wakes and writes: refused by Postgres, and by nobody without the fence.

The processes are real and stopped by SIGSTOP between BEGIN and the write, where no check of the client's
stands between: it is Postgres that answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.services import Services
from support.sql import Connect, Connection
from support.workers import Worker

Clerks = Callable[..., Worker]

STATEMENTS = {
    "update of a row that the new holder wrote": "update {table} set amount = -1 where id = 1",
    "update of a row that the new holder never touched": "update {table} set amount = -1 where id = 2",
    "insert of a row": "insert into {table} (id, ledger, amount) values (4, 'main', -1)",
    "delete of a row": "delete from {table} where id = 2",
}
STALE_EFFECT = {
    "update of a row that the new holder wrote": [(1, -1), (2, 100), (3, 100)],
    "update of a row that the new holder never touched": [(1, 200), (2, -1), (3, 100)],
    "insert of a row": [(1, 200), (2, 100), (3, 100), (4, -1)],
    "delete of a row": [(1, 200), (3, 100)],
}
NEW_HOLDERS_ROWS = [(1, 200), (2, 100), (3, 100)]


@pytest.fixture
def ledger(pg: Connect) -> Connection:
    """The table `entry`, fenced, and `plain`, the control; three rows each."""
    connection = pg()
    for table in ("entry", "plain"):
        connection.execute(
            f"create table {table} (id bigint primary key, ledger text not null, amount bigint not null)"
        )
        connection.execute(f"insert into {table} select n, 'main', 100 from generate_series(1, 3) n")
    connection.execute("select fenceguard.add_fence('entry', 'ledger:{ledger}', 'enforce')")
    return connection


@pytest.fixture
def clerk(worker: Callable[..., Worker], services: Services, database_url: str, prefix: str) -> Clerks:
    """A factory of worker processes on the ledger, see `support.clerk`."""

    def start(statement: str, *, fenced: bool, wait: float = 15.0) -> Worker:
        order = {
            "postgres": database_url,
            "redis": services.redis_url,
            "prefix": prefix,
            "ttl": 0.6,
            "wait": wait,
            "fenced": fenced,
            "statement": statement.format(table="entry" if fenced else "plain"),
        }
        return worker("support.clerk", json.dumps(order))

    return start


def go_to(clerk: Worker, step: str) -> None:
    """Let the clerk work until it has reached `step`."""
    while (reached := clerk.hear()) != step:
        clerk.say(f"{reached}: go on")


def outcome(clerk: Worker) -> dict[str, Any]:
    """Let the clerk work to its end and return what became of it."""
    while True:
        clerk.say("go on")
        if (line := clerk.hear()).startswith("{"):
            return json.loads(line)


def rows(ledger: Connection, *, fenced: bool) -> list[tuple[int, int]]:
    return ledger.execute(f"select id, amount from {'entry' if fenced else 'plain'} order by id").fetchall()


def take_over(clerk: Clerks, *, fenced: bool) -> dict[str, Any]:
    """Let a second clerk wait for the lease to run out, write row 1 and end."""
    second = clerk("update {table} set amount = 200 where id = 1", fenced=fenced)
    go_to(second, "holding")
    return outcome(second)


def frozen_then_writing(clerk: Clerks, statement: str, *, fenced: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Freeze one clerk between BEGIN and its write, let a second take over and write, thaw the first."""
    first = clerk(statement, fenced=fenced)
    go_to(first, "begun")
    first.freeze()
    second = take_over(clerk, fenced=fenced)
    first.thaw()
    return outcome(first), second


@pytest.mark.case(
    "frozen holder (SIGSTOP): update, insert, delete, also of a row that the new holder never touched",
    control="test_control_the_write_of_a_frozen_holder_lands_without_the_fence",
)
@pytest.mark.case(
    "case 12: the process stalls longer than the ttl",
    control="test_control_the_write_of_a_frozen_holder_lands_without_the_fence",
)
@pytest.mark.case(
    "case 2: a frozen worker writes its result by primary key",
    control="test_control_the_write_of_a_frozen_holder_lands_without_the_fence",
)
@pytest.mark.parametrize("what", STATEMENTS)
def test_the_write_of_a_holder_frozen_before_it_is_refused_by_postgres(
    clerk: Clerks, ledger: Connection, what: str
) -> None:
    first, second = frozen_then_writing(clerk, STATEMENTS[what], fenced=True)
    assert (first["error"], first["sqlstate"]) == ("StaleToken", "ZF001")
    assert second["error"] is None
    assert second["token"] == first["token"] + 1
    assert rows(ledger, fenced=True) == NEW_HOLDERS_ROWS


@pytest.mark.parametrize("what", STATEMENTS)
def test_control_the_write_of_a_frozen_holder_lands_without_the_fence(
    clerk: Clerks, ledger: Connection, what: str
) -> None:
    first, second = frozen_then_writing(clerk, STATEMENTS[what], fenced=False)
    assert (first["error"], second["error"]) == (None, None)
    assert second["token"] == first["token"] + 1
    assert rows(ledger, fenced=False) == STALE_EFFECT[what]


@pytest.mark.case(
    "an open stale transaction cannot commit after the claim returned",
    control="test_control_a_transaction_frozen_after_its_write_commits_after_the_takeover_without_the_fence",
)
def test_a_transaction_frozen_after_its_write_commits_before_the_next_claim_returns_and_never_after(
    clerk: Clerks, ledger: Connection
) -> None:
    first = clerk("update {table} set amount = -1 where id = 2", fenced=True)
    go_to(first, "written")
    first.freeze()
    # The lease is soon free; the second clerk's claim waits for the frozen transaction, then gives up.
    second = clerk("update {table} set amount = 200 where id = 1", fenced=True, wait=2.0)
    assert json.loads(second.hear())["error"] == "ClaimTimeout"
    first.thaw()
    assert outcome(first)["error"] is None
    third = take_over(clerk, fenced=True)
    assert third["error"] is None
    assert rows(ledger, fenced=True) == [(1, 200), (2, -1), (3, 100)]


def test_control_a_transaction_frozen_after_its_write_commits_after_the_takeover_without_the_fence(
    clerk: Clerks, ledger: Connection
) -> None:
    first = clerk("update {table} set amount = -1 where id = 2", fenced=False)
    go_to(first, "written")
    first.freeze()
    second = take_over(clerk, fenced=False)
    assert second["error"] is None
    before_the_thaw = rows(ledger, fenced=False)
    first.thaw()
    assert outcome(first)["error"] is None
    assert before_the_thaw == NEW_HOLDERS_ROWS
    assert rows(ledger, fenced=False) == STALE_EFFECT["update of a row that the new holder never touched"]
