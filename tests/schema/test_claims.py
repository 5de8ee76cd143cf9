"""fenceguard.claim, gate_holders and the fence itself."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql
from support.sql import (
    Connect,
    announce,
    claim,
    detail,
    in_background,
    refusal,
    scalar,
    sqlstate,
    until_waiting,
    writing,
)

from fenceguard import StaleToken
from fenceguard.errors import refusal as as_error
from fenceguard.schema import HEAD

FENCE = "select token, owner from fenceguard.fence where resource = %s"


def test_a_first_claim_makes_the_fence_on_the_present_timeline(pg: Connect) -> None:
    connection = pg()

    answer = claim(connection, "account:42", 7, "ann")

    assert answer == 7
    row = connection.execute("select resource, token, owner, timeline from fenceguard.fence").fetchall()
    assert row == [("account:42", 7, "ann", scalar(connection, "select fenceguard.timeline()"))]


def test_a_larger_token_raises_the_fence(pg: Connect) -> None:
    connection = pg()
    claim(connection, "account:42", 7, "ann")

    claim(connection, "account:42", 9, "bob")

    assert connection.execute(FENCE, ("account:42",)).fetchone() == (9, "bob")


def test_a_smaller_token_is_refused_with_both_tokens_and_the_newest_owner(pg: Connect) -> None:
    connection = pg()
    claim(connection, "account:42", 7, "ann")

    error = refusal(connection, "select fenceguard.claim('account:42', 6, 'bob')")

    assert error is not None
    assert error.sqlstate == "ZF001"
    assert detail(error) == {"resource": "account:42", "token": 6, "newest": 7, "owner": "ann"}
    assert connection.execute(FENCE, ("account:42",)).fetchone() == (7, "ann")


def test_an_equal_token_of_another_owner_is_refused(pg: Connect) -> None:
    connection = pg()
    claim(connection, "account:42", 7, "ann")

    error = refusal(connection, "select fenceguard.claim('account:42', 7, 'bob')")

    assert error is not None
    assert error.sqlstate == "ZF001"
    assert connection.execute(FENCE, ("account:42",)).fetchone() == (7, "ann")


def test_of_two_claims_of_one_token_at_once_exactly_one_has_it(pg: Connect) -> None:
    # Redis was flushed while A held token 1: B acquires and gets 1 as well.
    gatekeeper, a, b, observer = pg(), pg(), pg(), pg()
    with in_background() as submit:
        gatekeeper.execute("begin")
        gatekeeper.execute("select pg_advisory_xact_lock(fenceguard.gate('account:42'))")
        answers = [
            submit(sqlstate, connection, "select fenceguard.claim('account:42', 1, %s)", owner)
            for connection, owner in ((a, "ann"), (b, "bob"))
        ]
        until_waiting(observer, a)
        until_waiting(observer, b)
        gatekeeper.execute("commit")

        assert sorted(str(answer.result()) for answer in answers) == ["None", "ZF001"]


def test_a_claim_whose_reply_was_lost_is_answered_again(pg: Connect) -> None:
    connection = pg()
    claim(connection, "account:42", 7, "ann")

    answer = claim(connection, "account:42", 7, "ann")

    assert answer == 7


def test_a_claim_repeated_on_another_timeline_is_refused(pg: Connect) -> None:
    connection = pg()
    claim(connection, "account:42", 7, "ann")
    connection.execute("update fenceguard.fence set timeline = '000000FE'")

    error = refusal(connection, "select fenceguard.claim('account:42', 7, 'ann')")

    assert error is not None
    assert error.sqlstate == "ZF001"
    assert claim(connection, "account:42", 8, "ann") == 8


@pytest.mark.parametrize(
    ("resource", "token", "owner"),
    [
        (None, 1, "a"),
        ("", 1, "a"),
        ("x" * 513, 1, "a"),
        ("é" * 257, 1, "a"),
        ("tab\there", 1, "a"),
        ("del\x7f", 1, "a"),
        ("c1\x85", 1, "a"),
        ("r", None, "a"),
        ("r", 0, "a"),
        ("r", -1, "a"),
        ("r", 2**53, "a"),
        ("r", 2**63 - 1, "a"),
        ("r", 1, None),
        ("r", 1, ""),
        ("r", 1, "line\nbreak"),
    ],
)
def test_a_claim_of_nothing_sensible_is_refused(
    pg: Connect, resource: str | None, token: int | None, owner: str | None
) -> None:
    connection = pg()

    error = refusal(connection, "select fenceguard.claim(%s, %s, %s)", resource, token, owner)

    assert error is not None
    assert error.sqlstate == "22023"
    assert error.diag.message_hint
    assert scalar(connection, "select count(*) from fenceguard.fence") == 0


@pytest.mark.parametrize("resource", ["x" * 512, "é" * 256, "größe:→ 42", '"; drop table fence', "%s {} \\"])
def test_every_other_name_can_be_claimed(pg: Connect, resource: str) -> None:
    connection = pg()

    assert claim(connection, resource, 2**53 - 1, resource) == 2**53 - 1
    with writing(connection, (resource, 2**53 - 1, resource)):
        assert sqlstate(connection, "select fenceguard.enter_announced()") is None


def test_a_negative_wait_is_refused(pg: Connect) -> None:
    assert sqlstate(pg(), "select fenceguard.claim('r', 1, 'a', -1)") == "22023"


# -- the gate


def test_a_claim_waits_for_the_open_transaction_of_the_holder_before(pg: Connect) -> None:
    old, new, observer = pg(), pg(), pg()
    claim(old, "account:42", 7, "ann")
    old.execute("begin")
    announce(old, ("account:42", 7, "ann"))
    old.execute("select fenceguard.enter_announced()")
    with in_background() as submit:
        claimed = submit(claim, new, "account:42", 8, "bob")
        until_waiting(observer, new)
        waited = not claimed.done()
        old.execute("commit")

        assert claimed.result() == 8
    assert waited


@pytest.mark.parametrize("wait_ms", [0, 30])
def test_a_claim_that_may_not_wait_gives_up_and_leaves_the_fence(pg: Connect, wait_ms: int) -> None:
    old, new = pg(), pg()
    claim(old, "account:42", 7, "ann")
    with writing(old, ("account:42", 7, "ann")):
        old.execute("select fenceguard.enter_announced()")

        refused = sqlstate(new, "select fenceguard.claim('account:42', 8, 'bob', %s)", wait_ms)

    assert refused == "55P03"
    assert new.execute(FENCE, ("account:42",)).fetchone() == (7, "ann")


def test_without_a_wait_of_its_own_the_sessions_lock_timeout_rules(pg: Connect) -> None:
    old, new = pg(), pg()
    claim(old, "account:42", 7, "ann")
    new.execute("set lock_timeout = '30ms'")
    with writing(old, ("account:42", 7, "ann")):
        old.execute("select fenceguard.enter_announced()")

        refused = sqlstate(new, "select fenceguard.claim('account:42', 8, 'bob')")

    assert refused == "55P03"


def test_a_claim_leaves_the_lock_timeout_of_a_transaction_around_it(pg: Connect) -> None:
    connection = pg()
    connection.execute("set lock_timeout = '7s'")
    connection.execute("begin")

    claim(connection, "account:42", 7, "ann", wait_ms=30)

    assert scalar(connection, "show lock_timeout") == "7s"


def test_claims_of_other_resources_do_not_wait(pg: Connect) -> None:
    old, new = pg(), pg()
    claim(old, "account:42", 7, "ann")
    with writing(old, ("account:42", 7, "ann")):
        old.execute("select fenceguard.enter_announced()")

        assert claim(new, "account:43", 1, "bob", wait_ms=0) == 1


def test_gate_holders_names_backend_state_and_query(pg: Connect) -> None:
    old, new = pg(application_name="worker a"), pg()
    claim(old, "account:42", 7, "ann")
    with writing(old, ("account:42", 7, "ann")):
        old.execute("select fenceguard.enter_announced() -- the very query")

        (line,) = [row[0] for row in new.execute("select fenceguard.gate_holders('account:42')")]
        elsewhere = new.execute("select fenceguard.gate_holders('account:43')").fetchall()

    assert line.startswith(f"pid {old.info.backend_pid} (worker a), idle in transaction for ")
    assert line.endswith("last query: select fenceguard.enter_announced() -- the very query")
    assert elsewhere == []


def test_gate_holders_names_a_prepared_transaction(pg: Connect, database_url: str) -> None:
    old, new = pg(), pg()
    if scalar(new, "show max_prepared_transactions") == "0":
        pytest.skip("this server allows no prepared transactions")
    claim(old, "account:42", 7, "ann")
    old.execute("begin")
    announce(old, ("account:42", 7, "ann"))
    old.execute("select fenceguard.enter_announced()")
    gid = f"{database_url.rsplit('/', 1)[1]} it's"
    old.execute(sql.SQL("prepare transaction {}").format(gid))
    try:
        (line,) = [row[0] for row in new.execute("select fenceguard.gate_holders('account:42')")]
        refused = sqlstate(new, "select fenceguard.claim('account:42', 8, 'bob', 0)")
    finally:
        new.execute(sql.SQL("rollback prepared {}").format(gid))

    assert line.startswith(f'prepared transaction "{gid}" of ')
    assert refused == "55P03"
    assert claim(new, "account:42", 8, "bob", wait_ms=0) == 8


# -- durability


@pytest.mark.parametrize(
    ("session", "claims"), [("off", "on"), ("local", "on"), ("on", "on"), ("remote_apply", "remote_apply")]
)
def test_a_claim_commits_synchronously_whatever_the_session_says(pg: Connect, session: str, claims: str) -> None:
    connection = pg()
    connection.execute(f"set synchronous_commit = {session}")
    connection.execute("begin")

    claim(connection, "account:42", 7, "ann")
    inside = scalar(connection, "show synchronous_commit")
    connection.execute("commit")

    assert inside == claims
    assert scalar(connection, "show synchronous_commit") == session


# -- changes by hand


def test_a_change_by_hand_waits_for_the_gate_as_a_claim_does(pg: Connect) -> None:
    old, operator, observer = pg(), pg(), pg()
    claim(old, "account:42", 7, "ann")
    old.execute("begin")
    announce(old, ("account:42", 7, "ann"))
    old.execute("select fenceguard.enter_announced()")
    with in_background() as submit:
        changed = submit(operator.execute, "update fenceguard.fence set token = 9")
        until_waiting(observer, operator)
        waited = not changed.done()
        old.execute("commit")
        changed.result()

    assert waited
    assert scalar(operator, "select token from fenceguard.fence") == 9


@pytest.mark.parametrize("change", ["set token = 6", "set resource = 'account:43'"])
def test_by_hand_too_a_fence_stays_and_never_goes_down(pg: Connect, change: str) -> None:
    connection = pg()
    claim(connection, "account:42", 7, "ann")

    error = refusal(connection, f"update fenceguard.fence {change}")

    assert error is not None
    assert error.sqlstate == "55000"


def test_the_fences_cannot_be_truncated(pg: Connect) -> None:
    assert sqlstate(pg(), "truncate fenceguard.fence") == "55000"


@pytest.mark.parametrize(
    ("column", "value"),
    [("token", "0"), ("token", "9007199254740992"), ("owner", "''"), ("owner", "e'a\\tb'"), ("timeline", "'1'")],
)
def test_by_hand_too_nothing_senseless_becomes_a_fence(pg: Connect, column: str, value: str) -> None:
    connection = pg()
    row = {"resource": "'r'", "token": "1", "owner": "'a'", "timeline": "'00000001'", column: value}

    refused = sqlstate(
        connection, f"insert into fenceguard.fence ({', '.join(row)}) values ({', '.join(row.values())})"
    )

    assert refused == "23514"


def test_the_version_is_the_newest_migration(pg: Connect) -> None:
    assert scalar(pg(), "select fenceguard.version()") == HEAD


def test_a_refused_claim_maps_to_the_python_error(pg: Connect) -> None:
    connection = pg()
    claim(connection, "account:42", 7, "ann")
    refused = refusal(connection, "select fenceguard.claim('account:42', 6, 'bob')")
    assert isinstance(refused, psycopg.Error)

    error = as_error(refused.sqlstate, refused.diag.message_detail)

    assert isinstance(error, StaleToken)
    assert (error.resource, error.token, error.newest, error.owner) == ("account:42", 6, 7, "ann")
