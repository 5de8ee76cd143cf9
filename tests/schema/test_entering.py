"""Announcing and entering: what fenceguard.enter_announced and fenceguard.enter prove, remember and refuse."""

from __future__ import annotations

import json

import psycopg
import pytest
from support.sql import (
    Connect,
    Connection,
    announce,
    claim,
    detail,
    grants,
    in_background,
    refusal,
    scalar,
    sqlstate,
    until_waiting,
    writing,
)

ENTER = "select fenceguard.enter_announced()"
ABOVE = ["repeatable read", "serializable"]
LEVELS = ["read committed", *ABOVE]


def gates(connection: Connection) -> int:
    """Return how many gates the connection's own transaction holds."""
    return scalar(
        connection, "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
    )


# -- what is compared


@pytest.mark.parametrize("isolation", LEVELS)
def test_the_newest_claim_enters(pg: Connect, isolation: str) -> None:
    connection = pg()
    claim(connection, "account:42", 7)

    with writing(connection, ("account:42", 7), isolation=isolation):
        refused = sqlstate(connection, ENTER)
        held = gates(connection)

    assert refused is None
    assert held == 1


@pytest.mark.parametrize("announcement", [None, "", "{}"])
def test_nothing_announced_enters_nothing(pg: Connect, announcement: str | None) -> None:
    connection = pg()
    connection.execute("begin")
    if announcement is not None:
        connection.execute("select set_config('fenceguard.grants', %s, true)", (announcement,))

    connection.execute(ENTER)

    assert gates(connection) == 0


def test_the_empty_text_that_a_transaction_leaves_behind_is_unannounced(pg: Connect) -> None:
    connection = pg()
    claim(connection, "account:42", 7)
    with writing(connection, ("account:42", 7)):
        connection.execute(ENTER)

    connection.execute("begin")
    left = scalar(connection, "select current_setting('fenceguard.grants', true)")
    connection.execute(ENTER)

    assert left == ""
    assert gates(connection) == 0


@pytest.mark.parametrize("isolation", LEVELS)
def test_an_older_token_is_stale(pg: Connect, isolation: str) -> None:
    connection = pg()
    claim(connection, "account:42", 8, "bob")
    connection.execute(f"begin isolation level {isolation}")
    announce(connection, ("account:42", 7, "ann"))

    error = refusal(connection, ENTER)

    assert error is not None
    assert error.sqlstate == "ZF001"
    assert detail(error) == {"resource": "account:42", "token": 7, "newest": 8, "table": None, "key": None}


@pytest.mark.parametrize("isolation", LEVELS)
def test_an_equal_token_of_another_owner_is_stale(pg: Connect, isolation: str) -> None:
    # Redis was flushed: ann and bob were both given token 1, and bob has claimed it.
    connection = pg()
    claim(connection, "account:42", 1, "bob")
    connection.execute(f"begin isolation level {isolation}")
    announce(connection, ("account:42", 1, "ann"))

    error = refusal(connection, ENTER)

    assert error is not None
    assert error.sqlstate == "ZF001"
    assert detail(error) == {"resource": "account:42", "token": 1, "newest": 1, "table": None, "key": None}


@pytest.mark.parametrize("isolation", LEVELS)
def test_a_larger_token_than_the_fence_is_not_claimed(pg: Connect, isolation: str) -> None:
    connection = pg()
    claim(connection, "account:42", 7)
    connection.execute(f"begin isolation level {isolation}")
    announce(connection, ("account:42", 8))

    error = refusal(connection, ENTER)

    assert error is not None
    assert error.sqlstate == "ZF003"
    assert detail(error) == {"resource": "account:42", "token": 8}


@pytest.mark.parametrize(
    ("isolation", "state"), [("read committed", "ZF003"), *((level, "ZF005") for level in ABOVE)]
)
def test_a_resource_without_a_fence_is_not_claimed_or_not_visibly_so(
    pg: Connect, isolation: str, state: str
) -> None:
    connection = pg()
    connection.execute(f"begin isolation level {isolation}")
    announce(connection, ("account:42", 1))

    error = refusal(connection, ENTER)

    assert error is not None
    assert error.sqlstate == state
    assert detail(error) == {"resource": "account:42", "token": 1}


@pytest.mark.parametrize("isolation", LEVELS)
def test_a_claim_made_on_another_timeline_is_not_claimed(pg: Connect, isolation: str) -> None:
    connection = pg()
    claim(connection, "account:42", 7)
    # As after the promotion of a standby.
    connection.execute("update fenceguard.fence set timeline = '000000FE'")
    connection.execute(f"begin isolation level {isolation}")
    announce(connection, ("account:42", 7))

    refused = sqlstate(connection, ENTER)

    assert refused == "ZF003"


@pytest.mark.parametrize("isolation", LEVELS)
def test_a_newer_token_on_another_timeline_is_stale_all_the_same(pg: Connect, isolation: str) -> None:
    connection = pg()
    claim(connection, "account:42", 8)
    connection.execute("update fenceguard.fence set timeline = '000000FE'")
    connection.execute(f"begin isolation level {isolation}")
    announce(connection, ("account:42", 7))

    assert sqlstate(connection, ENTER) == "ZF001"


# -- snapshots: the claim happens after the transaction began


@pytest.mark.parametrize("isolation", LEVELS)
def test_a_claim_younger_than_the_snapshot_makes_the_holder_before_stale(pg: Connect, isolation: str) -> None:
    old, new = pg(), pg()
    claim(old, "account:42", 7, "ann")
    old.execute(f"begin isolation level {isolation}")
    announce(old, ("account:42", 7, "ann"))
    old.execute("select * from fenceguard.fence")
    claim(new, "account:42", 8, "bob")

    error = refusal(old, ENTER)

    assert error is not None
    assert error.sqlstate == "ZF001"
    assert detail(error)["newest"] == 8


@pytest.mark.parametrize("isolation", ABOVE)
def test_above_read_committed_the_newest_token_may_be_hidden_and_is_told_as_the_least_it_can_be(
    pg: Connect, isolation: str
) -> None:
    old, new = pg(), pg()
    claim(old, "account:42", 7, "ann")
    old.execute(f"begin isolation level {isolation}")
    announce(old, ("account:42", 7, "ann"))
    old.execute("select * from fenceguard.fence")
    claim(new, "account:42", 1000, "bob")

    assert detail(refusal(old, ENTER))["newest"] == 8


@pytest.mark.parametrize("isolation", ABOVE)
def test_our_own_claim_younger_than_the_snapshot_may_be_retried(pg: Connect, isolation: str) -> None:
    writer, claimer = pg(), pg()
    claim(claimer, "account:42", 7, "ann")
    writer.execute(f"begin isolation level {isolation}")
    writer.execute("select * from fenceguard.fence")
    claim(claimer, "account:42", 8, "bob")
    announce(writer, ("account:42", 8, "bob"))

    error = refusal(writer, ENTER)
    writer.execute("rollback")
    with writing(writer, ("account:42", 8, "bob"), isolation=isolation):
        again = sqlstate(writer, ENTER)

    assert error is not None
    assert error.sqlstate == "ZF005"
    assert detail(error) == {"resource": "account:42", "token": 8}
    assert again is None


@pytest.mark.parametrize("isolation", ABOVE)
def test_our_first_claim_younger_than_the_snapshot_may_be_retried(pg: Connect, isolation: str) -> None:
    writer, claimer = pg(), pg()
    writer.execute(f"begin isolation level {isolation}")
    writer.execute("select * from fenceguard.fence")
    claim(claimer, "account:42", 8, "bob")
    announce(writer, ("account:42", 8, "bob"))

    assert sqlstate(writer, ENTER) == "ZF005"


def test_at_read_committed_our_own_younger_claim_enters(pg: Connect) -> None:
    writer, claimer = pg(), pg()
    with writing(writer):
        writer.execute("select * from fenceguard.fence")
        claim(claimer, "account:42", 8, "bob")
        announce(writer, ("account:42", 8, "bob"))

        refused = sqlstate(writer, ENTER)

    assert refused is None


def test_a_serialization_failure_of_another_kind_stays_one(pg: Connect) -> None:
    # Two transactions read what the other writes; one of them has committed, so the other cannot.
    a, b = pg(), pg()
    a.execute("create table pair (id int primary key, value int)")
    a.execute("insert into pair values (1, 0), (2, 0)")
    claim(a, "account:42", 7)
    for one, row in ((a, 1), (b, 2)):
        one.execute("begin isolation level serializable")
        one.execute("select sum(value) from pair")
        one.execute("update pair set value = 1 where id = %s", (row,))
    b.execute("commit")
    announce(a, ("account:42", 7))

    refused = sqlstate(a, ENTER)

    assert refused == "40001"


@pytest.mark.parametrize("isolation", LEVELS)
def test_while_a_claim_waits_a_writer_waits_behind_it_and_is_then_stale(pg: Connect, isolation: str) -> None:
    first, second, new, observer = pg(), pg(), pg(), pg()
    claim(first, "account:42", 7, "ann")
    first.execute("begin")
    announce(first, ("account:42", 7, "ann"))
    first.execute(ENTER)
    second.execute(f"begin isolation level {isolation}")
    announce(second, ("account:42", 7, "ann"))
    with in_background() as submit:
        claimed = submit(claim, new, "account:42", 8, "bob")
        until_waiting(observer, new)
        entered = submit(sqlstate, second, ENTER)
        until_waiting(observer, second)
        first.execute("commit")

        assert claimed.result() == 8
        assert entered.result() == "ZF001"


# -- what is remembered


def test_a_second_entering_of_the_same_announcement_reads_no_fence(pg: Connect) -> None:
    # Seen from outside: a fence changed behind the gate's back, as only a superuser can, is not looked at again.
    writer, operator = pg(), pg()
    claim(writer, "account:42", 7)
    operator.execute("alter table fenceguard.fence disable trigger guard")
    with writing(writer, ("account:42", 7)):
        writer.execute(ENTER)
        operator.execute("update fenceguard.fence set token = 8")

        refused = sqlstate(writer, ENTER)

    with pytest.raises(psycopg.Error) as caught, writing(writer, ("account:42", 7)):
        writer.execute(ENTER)
    assert refused is None
    assert caught.value.sqlstate == "ZF001"


def test_a_second_announcement_is_entered_as_well(pg: Connect) -> None:
    connection = pg()
    claim(connection, "account:42", 7)
    claim(connection, "account:43", 9)
    connection.execute("begin")
    announce(connection, ("account:42", 7))
    connection.execute(ENTER)

    announce(connection, ("account:42", 7), ("account:43", 8))

    assert sqlstate(connection, ENTER) == "ZF001"


@pytest.mark.parametrize("xid", ["", "0 ", "1 ", "9223372036854775807 "])
def test_a_mark_forged_at_session_level_proves_nothing(pg: Connect, xid: str) -> None:
    connection = pg()
    claim(connection, "account:42", 8)
    for setting in ("fenceguard.entered", "fenceguard.gates"):
        connection.execute("select set_config(%s, %s, false)", (setting, xid + grants(("account:42", 7))))
    connection.execute("begin")
    announce(connection, ("account:42", 7))

    assert sqlstate(connection, ENTER) == "ZF001"


def test_the_mark_of_one_transaction_is_worth_nothing_in_the_next(pg: Connect) -> None:
    connection = pg()
    claim(connection, "account:42", 7)
    connection.execute("begin")
    announce(connection, ("account:42", 7))
    connection.execute(ENTER)
    mark = scalar(connection, "show fenceguard.entered")
    connection.execute("commit")
    connection.execute("select set_config('fenceguard.entered', %s, false)", (mark,))
    claim(connection, "account:42", 8)

    connection.execute("begin")
    announce(connection, ("account:42", 7))

    assert sqlstate(connection, ENTER) == "ZF001"


def test_a_savepoint_rolled_back_takes_gate_and_mark_with_it(pg: Connect) -> None:
    old, new = pg(), pg()
    claim(old, "account:42", 7, "ann")
    old.execute("begin")
    announce(old, ("account:42", 7, "ann"))
    old.execute("savepoint s")
    old.execute(ENTER)
    old.execute("rollback to savepoint s")
    held = gates(old)

    claim(new, "account:42", 8, "bob", wait_ms=0)

    assert held == 0
    assert sqlstate(old, ENTER) == "ZF001"


def test_a_savepoint_released_keeps_gate_and_mark(pg: Connect) -> None:
    old, new = pg(), pg()
    claim(old, "account:42", 7, "ann")
    with writing(old, ("account:42", 7, "ann")):
        old.execute("savepoint s")
        old.execute(ENTER)
        old.execute("release savepoint s")

        refused = sqlstate(new, "select fenceguard.claim('account:42', 8, 'bob', 0)")

    assert refused == "55P03"


def test_the_gate_outlives_the_announcement(pg: Connect) -> None:
    old, new = pg(), pg()
    claim(old, "account:42", 7, "ann")
    with writing(old, ("account:42", 7, "ann")):
        old.execute(ENTER)
        announce(old)

        refused = sqlstate(new, "select fenceguard.claim('account:42', 8, 'bob', 0)")

    assert refused == "55P03"


# -- limits


@pytest.mark.parametrize(
    ("isolation", "session", "inside"),
    [
        ("read committed", "0", "1min"),
        ("repeatable read", "0", "1min"),
        ("read committed", "5s", "5s"),
        ("read committed", "250ms", "250ms"),
        ("read committed", "1min", "1min"),
        ("read committed", "2h", "1min"),
    ],
)
def test_an_entered_transaction_may_idle_for_a_minute_or_less(
    pg: Connect, isolation: str, session: str, inside: str
) -> None:
    connection = pg()
    claim(connection, "account:42", 7)
    connection.execute(f"set idle_in_transaction_session_timeout = '{session}'")

    with writing(connection, ("account:42", 7), isolation=isolation):
        connection.execute(ENTER)
        found = scalar(connection, "show idle_in_transaction_session_timeout")

    assert found == inside
    assert scalar(connection, "show idle_in_transaction_session_timeout") == session


def test_sixty_four_resources_may_be_entered(pg: Connect) -> None:
    connection = pg()
    held = [(f"r{n}", 1) for n in range(64)]
    for resource, token in held:
        claim(connection, resource, token)

    with writing(connection, *held):
        refused = sqlstate(connection, ENTER)
        taken = gates(connection)

    assert refused is None
    assert taken == 64


@pytest.mark.case(
    "case 42: a transaction enters 10,000 resources", control="test_sixty_four_resources_may_be_entered"
)
@pytest.mark.parametrize("count", [65, 10_000])
def test_more_are_refused_before_any_lock(pg: Connect, count: int) -> None:
    connection = pg()
    connection.execute("begin")
    announce(connection, *((f"r{n}", 1) for n in range(count)))
    connection.execute("savepoint s")

    error = refusal(connection, ENTER)
    connection.execute("rollback to savepoint s")

    assert error is not None
    assert error.sqlstate == "ZF006"
    assert detail(error) == {"count": count, "limit": 64}
    assert gates(connection) == 0


def test_more_are_refused_also_when_announced_one_after_the_other(pg: Connect) -> None:
    connection = pg()
    connection.execute("select fenceguard.claim('r' || n, 1, 'a') from generate_series(1, 65) n")
    connection.execute("begin")
    for n in range(1, 65):
        announce(connection, (f"r{n}", 1))
        connection.execute(ENTER)
    announce(connection, ("r65", 1))

    error = refusal(connection, ENTER)

    assert error is not None
    assert error.sqlstate == "ZF006"
    assert detail(error) == {"count": 65, "limit": 64}


# -- announcements that are none


@pytest.mark.parametrize(
    "announcement",
    [
        "7",
        "null",
        "[]",
        '"account:42"',
        "{",
        "account:42=7",
        '{"r": 7}',
        '{"r": null}',
        '{"r": {}}',
        '{"r": {"token": 7}}',
        '{"r": {"owner": "a"}}',
        '{"r": {"token": "7", "owner": "a"}}',
        '{"r": {"token": null, "owner": "a"}}',
        '{"r": {"token": 7.5, "owner": "a"}}',
        '{"r": {"token": 1e3, "owner": 5}}',
        '{"r": {"token": 0, "owner": "a"}}',
        '{"r": {"token": -1, "owner": "a"}}',
        '{"r": {"token": true, "owner": "a"}}',
        f'{{"r": {{"token": {2**53}, "owner": "a"}}}}',
        f'{{"r": {{"token": {10**30}, "owner": "a"}}}}',
        '{"r": {"token": 7, "owner": null}}',
        '{"r": {"token": 7, "owner": ""}}',
        '{"r": {"token": 7, "owner": 5}}',
        '{"r": {"token": 7, "owner": "a\\u0007"}}',
        '{"": {"token": 7, "owner": "a"}}',
        '{"tab\\there": {"token": 7, "owner": "a"}}',
        '{"nul\\u0000": {"token": 7, "owner": "a"}}',
        '{"\\u009f": {"token": 7, "owner": "a"}}',
        json.dumps({"x" * 513: {"token": 7, "owner": "a"}}),
        json.dumps({"r": {"token": 7, "owner": "x" * 513}}),
    ],
)
def test_an_announcement_that_is_none_is_refused(pg: Connect, announcement: str) -> None:
    connection = pg()
    claim(connection, "r", 7)
    connection.execute("begin")
    connection.execute("select set_config('fenceguard.grants', %s, true)", (announcement,))

    error = refusal(connection, ENTER)

    assert error is not None
    assert error.sqlstate == "22023"
    assert error.diag.message_hint


def test_members_that_a_later_version_may_add_are_passed_over(pg: Connect) -> None:
    connection = pg()
    claim(connection, "r", 7)
    connection.execute("begin")
    connection.execute(
        "select set_config('fenceguard.grants', %s, true)", ('{"r": {"token": 7, "owner": "a", "since": 1}}',)
    )

    assert sqlstate(connection, ENTER) is None


# -- enter


def test_enter_announces_and_enters_at_once(pg: Connect) -> None:
    connection = pg()
    claim(connection, "account:42", 7)
    claim(connection, "account:43", 9)
    connection.execute("begin")
    announce(connection, ("account:42", 7))

    connection.execute("select fenceguard.enter('account:43', 9, 'a')")

    announced = json.loads(scalar(connection, "show fenceguard.grants"))
    assert announced == json.loads(grants(("account:42", 7), ("account:43", 9)))
    assert gates(connection) == 2
    connection.execute("commit")
    assert scalar(connection, "show fenceguard.grants") == ""


def test_enter_under_a_stale_token_is_refused(pg: Connect) -> None:
    connection = pg()
    claim(connection, "account:42", 8)

    assert sqlstate(connection, "select fenceguard.enter('account:42', 7, 'a')") == "ZF001"


@pytest.mark.parametrize(
    "arguments", ["null, 7, 'a'", "'', 7, 'a'", "'r', null, 'a'", "'r', 0, 'a'", "'r', 7, null", "'r', 7, ''"]
)
def test_enter_of_nothing_sensible_is_refused(pg: Connect, arguments: str) -> None:
    connection = pg()
    claim(connection, "r", 7)

    assert sqlstate(connection, f"select fenceguard.enter({arguments})") == "22023"
