"""Each rule of the SQL taken away: the damage that it prevents happens, and with the rule it does not.

The schema is installed from a copy of its SQL in which one rule is missing. So each scenario is its own control,
and the name beside each mutation is the test elsewhere that goes red with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

import psycopg
import pytest
from support.sql import (
    Connection,
    announce,
    claim,
    grants,
    in_background,
    scalar,
    sqlstate,
    until_waiting,
)
from support.waiting import PATIENCE

from fenceguard.schema import scripts

Pg: TypeAlias = Callable[[], Connection]
Edits: TypeAlias = tuple[tuple[str, str], ...]

WRITE = "update account set balance = 0 where id = 42"


def write_under(connection: Connection, token: int, owner: str, isolation: str = "read committed") -> None:
    """Begin a transaction that announces a grant of account 42."""
    connection.execute(f"begin isolation level {isolation}")
    announce(connection, ("account:42", token, owner))


# -- scenarios: each returns whether the damage happened


def one_token_for_two(pg: Pg) -> bool:
    """Redis was flushed: two holders were given token 1, and both are told that it is theirs."""
    a, b = pg(), pg()
    claim(a, "account:42", 1, "ann")
    return sqlstate(b, "select fenceguard.claim('account:42', 1, 'bob')") is None


def a_write_after_the_claim(pg: Pg) -> bool:
    """The claim has returned while the old holder's transaction is open; then that commits."""
    old, new = pg(), pg()
    claim(old, "account:42", 7, "ann")
    write_under(old, 7, "ann")
    old.execute(WRITE)
    claimed = sqlstate(new, "select fenceguard.claim('account:42', 8, 'bob', 50)") is None
    old.execute("commit")
    return claimed and scalar(new, "select balance from account where id = 42") == 0


def a_snapshot_older_than_the_gate(pg: Pg) -> bool:
    """The old holder waits at the gate behind the claim; once through, it looks at the fence of before."""
    claimer, old, observer = pg(), pg(), pg()
    claim(claimer, "account:42", 7, "ann")
    claimer.execute("begin")
    claim(claimer, "account:42", 8, "bob")
    write_under(old, 7, "ann")
    with in_background() as submit:
        writing = submit(sqlstate, old, WRITE)
        until_waiting(observer, old)
        claimer.execute("commit")
        landed = writing.result(PATIENCE) is None
    old.execute("rollback")
    return landed


def a_write_under_anothers_token(pg: Pg) -> bool:
    """Redis was flushed: ann and bob were given token 1, bob has claimed it, ann writes."""
    a, b = pg(), pg()
    claim(b, "account:42", 1, "bob")
    write_under(a, 1, "ann")
    return sqlstate(a, WRITE) is None


def a_write_under_a_claim_of_another_timeline(pg: Pg) -> bool:
    """A standby was promoted which had not seen all claims."""
    a = pg()
    claim(a, "account:42", 7)
    a.execute("update fenceguard.fence set timeline = '000000FE'")
    write_under(a, 7, "a")
    return sqlstate(a, WRITE) is None


def a_write_under_an_unclaimed_token(pg: Pg) -> bool:
    """The token was granted by Redis and never claimed: nothing keeps the holder before out."""
    a = pg()
    claim(a, "account:42", 7)
    write_under(a, 8, "a")
    return sqlstate(a, WRITE) is None


def a_write_from_an_old_snapshot(pg: Pg) -> bool:
    """At REPEATABLE READ the old holder sees the fence as it was when its transaction began."""
    old, new = pg(), pg()
    claim(old, "account:42", 7, "ann")
    write_under(old, 7, "ann", "repeatable read")
    old.execute("select * from fenceguard.fence")
    claim(new, "account:42", 8, "bob")
    return sqlstate(old, WRITE) is None


def a_mark_of_another_transaction(pg: Pg) -> bool:
    """A pooled connection carries "has entered" from an earlier transaction, as PgBouncer would leak it."""
    a = pg()
    claim(a, "account:42", 7)
    a.execute("select set_config('fenceguard.entered', %s, false)", (grants(("account:42", 7)),))
    claim(a, "account:42", 8)
    write_under(a, 7, "a")
    return sqlstate(a, WRITE) is None


def a_claim_that_a_crash_forgets(pg: Pg) -> bool:
    """Under ``synchronous_commit = off`` the claim is told before it is in the log."""
    a = pg()
    a.execute("set synchronous_commit = off")
    a.execute("begin")
    claim(a, "account:42", 7)
    return bool(scalar(a, "show synchronous_commit") == "off")


def a_partition_attached_later(pg: Pg) -> bool:
    """A partition that has no statement trigger of its own is written to directly."""
    a = pg()
    a.execute("create table entry_1 (like entry including all)")
    a.execute("insert into entry_1 values (1)")
    a.execute("alter table entry attach partition entry_1 for values in (1)")
    claim(a, "entry:1", 8)
    a.execute("begin")
    announce(a, ("entry:1", 7))
    return sqlstate(a, "delete from entry_1") is None


def a_row_of_another_resource(pg: Pg) -> bool:
    """The holder of account 43 writes to account 42, whose live holder it does not ask."""
    a = pg()
    claim(a, "account:43", 1)
    a.execute("begin")
    announce(a, ("account:43", 1))
    return sqlstate(a, WRITE) is None


def a_row_that_leaves_its_resource(pg: Pg) -> bool:
    """The holder of account 45 makes account 42 its own."""
    a = pg()
    claim(a, "account:45", 1)
    a.execute("begin")
    announce(a, ("account:45", 1))
    return sqlstate(a, "update account set id = 45 where id = 42") is None


def a_lock_table_filled(pg: Pg) -> bool:
    """One transaction takes as many gates as it likes."""
    a = pg()
    held = [(f"r{n}", 1) for n in range(65)]
    a.execute("select fenceguard.claim('r' || n, 1, 'a') from generate_series(0, 64) n")
    a.execute("begin")
    announce(a, *held)
    return sqlstate(a, "select fenceguard.enter_announced()") is None


def a_fence_changed_under_a_writer(pg: Pg) -> bool:
    """An operator changes a fence by hand while the holder before has an open transaction."""
    old, operator = pg(), pg()
    claim(old, "account:42", 7)
    write_under(old, 7, "a")
    old.execute(WRITE)
    operator.execute("set lock_timeout = '50ms'")
    changed = sqlstate(operator, "update fenceguard.fence set token = 9") is None
    old.execute("commit")
    return changed


@dataclass(frozen=True)
class Mutation:
    rule: str
    damage: Callable[[Pg], bool]
    red: str
    """The test that goes red without the rule."""
    edits: Edits


ENTER_BY_ROW = "perform fenceguard.enter_announced(pg_catalog.concat(tg_table_schema, '.', tg_table_name));"
GATE_BY_HAND = (
    "\n    perform pg_advisory_xact_lock("
    "fenceguard.gate(case tg_op when 'INSERT' then new.resource else old.resource end));\n"
)
GATE_OF_WRITER = "        perform pg_advisory_xact_lock_shared(fenceguard.gate(v_resource));\n"
COMPARE = "p_table text) returns void\n    language plpgsql "
OLD_ROW = """
            v_resource := %1$s;
            exit check_rows when (v_grants operator(pg_catalog.->) v_resource) is null;
"""
NEW_ROW = """
        v_resource := %2$s;
        exit check_rows when (v_grants operator(pg_catalog.->) v_resource) is null;
"""

MUTATIONS = [
    Mutation(
        "the claim's strict <",
        one_token_for_two,
        "schema/test_claims.py::test_of_two_claims_of_one_token_at_once_exactly_one_has_it",
        (("where f.token < excluded.token;", "where f.token <= excluded.token;"),),
    ),
    Mutation(
        "the claim's owner comparison",
        one_token_for_two,
        "schema/test_claims.py::test_an_equal_token_of_another_owner_is_refused",
        (
            ("if (v_fence.token, v_fence.owner, v_fence.timeline)", "if (v_fence.token, v_fence.timeline)"),
            ("distinct from (p_token, p_owner, fence", "distinct from (p_token, fence"),
        ),
    ),
    Mutation(
        "the gate, in the claim",
        a_write_after_the_claim,
        "schema/test_claims.py::test_a_claim_waits_for_the_open_transaction_of_the_holder_before",
        (("    perform fenceguard.take_gate(p_resource, p_wait_ms);\n", ""), (GATE_BY_HAND, "\n")),
    ),
    Mutation(
        "the gate, in the writer",
        a_write_after_the_claim,
        "safety/test_stale_writes.py::"
        "test_a_transaction_that_wrote_holds_the_claim_off_and_one_that_did_not_is_refused",
        ((GATE_OF_WRITER, ""),),
    ),
    Mutation(
        "the gate, for changes by hand",
        a_fence_changed_under_a_writer,
        "schema/test_claims.py::test_a_change_by_hand_waits_for_the_gate_as_a_claim_does",
        ((GATE_BY_HAND, "\n"),),
    ),
    Mutation(
        "a snapshot newer than the gate",
        a_snapshot_older_than_the_gate,
        "schema/test_entering.py::test_while_a_claim_waits_a_writer_waits_behind_it_and_is_then_stale",
        (
            (COMPARE + "volatile", COMPARE + "stable"),
            (GATE_OF_WRITER + "        perform fenceguard", GATE_OF_WRITER.replace(";\n", ", fenceguard")),
        ),
    ),
    Mutation(
        "the writer's owner comparison",
        a_write_under_anothers_token,
        "schema/test_entering.py::test_an_equal_token_of_another_owner_is_stale",
        (
            (" and v_fence.owner = p_owner\n", "\n"),
            (" or (v_fence.token = p_token and v_fence.owner <> p_owner)", ""),
        ),
    ),
    Mutation(
        "the writer's timeline comparison",
        a_write_under_a_claim_of_another_timeline,
        "schema/test_entering.py::test_a_claim_made_on_another_timeline_is_not_claimed",
        (("\n        and v_fence.timeline = fenceguard.timeline()\n", "\n"),),
    ),
    Mutation(
        "a writer's token must be claimed",
        a_write_under_an_unclaimed_token,
        "schema/test_entering.py::test_a_larger_token_than_the_fence_is_not_claimed",
        (("v_fence.token = p_token and v_fence.owner = p_owner\n", "v_fence.token <= p_token\n"),),
    ),
    Mutation(
        "the row lock above READ COMMITTED",
        a_write_from_an_old_snapshot,
        "schema/test_entering.py::test_a_claim_younger_than_the_snapshot_makes_the_holder_before_stale",
        ((" where resource = p_resource for share;", " where resource = p_resource;"),),
    ),
    Mutation(
        "the mark is bound to its transaction",
        a_mark_of_another_transaction,
        "schema/test_entering.py::test_a_mark_forged_at_session_level_proves_nothing",
        (
            ("v_xid := pg_current_xact_id()::text || ' ';", "v_xid := '';"),
            ("pg_catalog.concat(pg_catalog.pg_current_xact_id(), ' ', v_announced)", "v_announced"),
        ),
    ),
    Mutation(
        "the claim's synchronous commit",
        a_claim_that_a_crash_forgets,
        "schema/test_claims.py::test_a_claim_commits_synchronously_whatever_the_session_says",
        (("perform set_config('synchronous_commit', 'on', true);", "null;"),),
    ),
    Mutation(
        "rows enter where no statement trigger ran",
        a_partition_attached_later,
        "schema/test_levels.py::test_a_partition_attached_later_is_entered_by_its_rows",
        ((ENTER_BY_ROW + "\n    end if;%2$s", "null;\n    end if;%2$s"),),
    ),
    Mutation(
        "a row's resource must be announced",
        a_row_of_another_resource,
        "schema/test_levels.py::test_a_row_of_another_resource_is_refused",
        (
            (OLD_ROW, "\n            null;\n"),
            (NEW_ROW, "\n"),
            (" v_resource operator(pg_catalog.->>) 'token')", " 'account:43' operator(pg_catalog.->>) 'token')"),
        ),
    ),
    Mutation(
        "a row's old resource must be announced too",
        a_row_that_leaves_its_resource,
        "schema/test_levels.py::test_a_row_of_another_resource_is_refused",
        ((OLD_ROW, "\n            null;\n"),),
    ),
    Mutation(
        "at most 64 resources",
        a_lock_table_filled,
        "schema/test_entering.py::test_more_are_refused_before_any_lock",
        (("if v_count > 64 then", "if v_count > 64000 then"),),
    ),
]


@pytest.fixture
def installed(empty_database_url: str) -> Iterator[Callable[[Edits], Pg]]:
    """Install an edited copy of the SQL and fence `account` and `entry`; returns a factory of connections."""
    with ExitStack() as stack:

        def connect() -> Connection:
            connection = psycopg.connect(empty_database_url, autocommit=True)
            stack.callback(connection.close)
            return connection

        def install(edits: Edits) -> Pg:
            source = ";\n".join(scripts.statements("0001_up"))
            for old, new in edits:
                assert old in source, f"the SQL has changed, nothing to take away here: {old}"
                source = source.replace(old, new)
            connection = connect()
            connection.execute("create schema fenceguard")
            connection.execute(source.encode())
            connection.execute("create table account (id int primary key, balance int)")
            connection.execute("insert into account values (42, 100), (43, 100)")
            connection.execute("create table entry (id int) partition by list (id)")
            for table in ("account", "entry"):
                connection.execute(f"select fenceguard.add_fence('{table}', '{table}:{{id}}', 'enforce')".encode())
            return connect

        yield install


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.rule)
def test_without_the_rule_the_damage_happens(installed: Callable[[Edits], Pg], mutation: Mutation) -> None:
    assert mutation.damage(installed(mutation.edits))


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(
            mutation,
            id=mutation.rule,
            marks=pytest.mark.case(
                f"mutation: {mutation.rule}", control="test_without_the_rule_the_damage_happens"
            ),
        )
        for mutation in MUTATIONS
    ],
)
def test_with_every_rule_in_place_it_does_not(installed: Callable[[Edits], Pg], mutation: Mutation) -> None:
    assert not mutation.damage(installed(()))


def test_the_tests_that_go_red_exist(request: pytest.FixtureRequest) -> None:
    """That they are there; not that they go red, for which each would have to run on its edited schema."""
    for mutation in MUTATIONS:
        path, name = mutation.red.split("::")
        assert f"def {name}(" in (request.config.rootpath / "tests" / path).read_text(), mutation.red
