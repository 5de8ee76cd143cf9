"""After a stale answer nothing of the transaction commits, whatever becomes of the error."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from fence_talk import KEY, Holds, announced, claimed, told
from sqlalchemy import Engine, create_engine, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.bank import Account, Plain, balance
from support.urls import driver

from fenceguard import Claim, StaleToken, WrongResource
from fenceguard.fence import claim, enter
from fenceguard.fence.announce import announcement
from fenceguard.fence.session import attach

Bank = psycopg.Connection[Any]

WITHDRAW = update(Account).where(Account.id == 42).values(balance=1)
NOTE = update(Plain).where(Plain.id == 42).values(balance=1)


@pytest.fixture
def stale(attached: Engine, holds: Holds, bank: Bank) -> Engine:
    """An engine under a hold whose fence somebody else has raised."""
    holds.grants = [claimed(bank, 7)]
    claimed(bank, 8, owner="newer")
    return attached


@pytest.mark.case(
    "case 35: StaleToken swallowed inside a SAVEPOINT, then COMMIT",
    control="test_control_without_the_hooks_a_swallowed_refusal_lets_the_rest_commit",
)
def test_a_refusal_swallowed_inside_a_savepoint_dooms_the_commit_of_a_session(stale: Engine, bank: Bank) -> None:
    with Session(stale) as session:
        session.execute(NOTE)
        with suppress(StaleToken), session.begin_nested():
            session.execute(WITHDRAW)
        with pytest.raises(StaleToken) as caught:
            session.commit()
    assert caught.value.__cause__.sqlstate == "ZF001"  # type: ignore[union-attr]
    assert balance(bank, "plain") == 100


def test_a_refusal_swallowed_inside_a_savepoint_dooms_the_commit_of_a_connection(stale: Engine, bank: Bank) -> None:
    with stale.connect() as connection:
        connection.execute(NOTE)
        with suppress(StaleToken), connection.begin_nested():
            connection.execute(WITHDRAW)
        with pytest.raises(StaleToken):
            connection.commit()
        connection.rollback()
        assert connection.scalar(text("select 1")) == 1
    assert balance(bank, "plain") == 100


def test_control_without_the_hooks_a_swallowed_refusal_lets_the_rest_commit(database_url: str, bank: Bank) -> None:
    """Postgres alone takes the savepoint back and commits what was before it."""
    mine = claimed(bank, 7)
    claimed(bank, 8, owner="newer")
    engine = create_engine(driver(database_url, "psycopg"))
    with engine.begin() as connection:
        connection.execute(NOTE)
        with suppress(StaleToken), connection.begin_nested():
            enter(connection, mine)
    engine.dispose()
    assert balance(bank, "plain") == 1


def test_every_later_statement_of_a_doomed_transaction_raises_the_refusal(stale: Engine, holds: Holds) -> None:
    with stale.connect() as connection:
        savepoint = connection.begin_nested()
        with pytest.raises(StaleToken):
            connection.execute(WITHDRAW)
        savepoint.rollback()
        with pytest.raises(StaleToken) as caught:
            connection.execute(text("select 1"))
        with pytest.raises(StaleToken):
            connection.begin_nested()
    assert (caught.value.resource, caught.value.token, caught.value.newest) == (KEY, 7, 8)
    assert len(holds.refusals) == 1


def test_a_doomed_transaction_is_rolled_back_for_real_when_its_commit_is_refused(stale: Engine, bank: Bank) -> None:
    connection = stale.connect()
    pid = connection.scalar(text("select pg_backend_pid()"))
    with suppress(StaleToken), connection.begin_nested():
        connection.execute(WITHDRAW)
    with pytest.raises(StaleToken):
        connection.commit()
    state = bank.execute("select state from pg_stat_activity where pid = %s", (pid,)).fetchone()
    connection.close()
    assert state == ("idle",)


def test_the_transaction_after_a_doomed_one_is_a_clean_one(stale: Engine, holds: Holds, bank: Bank) -> None:
    with Session(stale) as session:
        with pytest.raises(StaleToken):
            session.execute(WITHDRAW)
        session.rollback()
        holds.grants = [claimed(bank, 9)]
        session.execute(WITHDRAW)
        assert announced(session) == told(*holds.grants)
        session.commit()
    assert balance(bank, "account") == 1


def test_a_session_whose_doomed_commit_was_refused_can_go_on(stale: Engine, holds: Holds, bank: Bank) -> None:
    with Session(stale) as session:
        with suppress(StaleToken), session.begin_nested():
            session.execute(WITHDRAW)
        with pytest.raises(StaleToken):
            session.commit()
        session.rollback()
        holds.grants = [claimed(bank, 9)]
        session.execute(WITHDRAW)
        session.commit()
    assert balance(bank, "account") == 1


def test_a_doomed_transaction_cannot_be_prepared(stale: Engine, bank: Bank) -> None:
    with stale.connect() as connection:
        transaction = connection.begin_twophase("doomed")
        connection.execute(NOTE)
        with suppress(StaleToken), connection.begin_nested():
            connection.execute(WITHDRAW)
        with pytest.raises(StaleToken):
            transaction.prepare()
        transaction.rollback()
    assert bank.execute("select count(*) from pg_prepared_xacts where gid = 'doomed'").fetchone() == (0,)
    assert balance(bank, "plain") == 100


def test_a_doomed_two_phase_transaction_cannot_be_committed_unprepared(stale: Engine, bank: Bank) -> None:
    with stale.connect() as connection:
        transaction = connection.begin_twophase("doomed")
        connection.execute(NOTE)
        with suppress(StaleToken), connection.begin_nested():
            connection.execute(WITHDRAW)
        with pytest.raises(StaleToken):
            transaction.commit()
    assert balance(bank, "plain") == 100


def test_entering_by_hand_under_an_old_token_dooms_as_well(attached: Engine, bank: Bank) -> None:
    mine = claimed(bank, 7)
    claimed(bank, 8, owner="newer")
    with attached.connect() as connection:
        connection.execute(NOTE)
        with suppress(StaleToken), connection.begin_nested():
            enter(connection, mine)
        with pytest.raises(StaleToken):
            connection.commit()
    assert balance(bank, "plain") == 100


@pytest.mark.parametrize("end", ["commit", "rollback", "close", "invalidate"])
def test_whoever_waits_for_the_end_of_a_transaction_is_called_once(attached: Engine, end: str) -> None:
    ends: list[str] = []
    with attached.connect() as connection:
        connection.execute(text("select 1"))
        state = announcement(connection)
        assert state is not None
        state.on_end.append(lambda: ends.append(end))
        assert not state.over
        getattr(connection, end)()
        if end == "invalidate":
            connection.rollback()
        assert state.over
    assert ends == [end]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_what_fails_at_the_end_of_a_transaction_is_logged_and_breaks_neither_end(
    attached: Engine, bank: Bank, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    ends: list[str] = []
    with attached.connect() as connection:
        connection.execute(NOTE)
        state = announcement(connection)
        assert state is not None
        state.on_end += [lambda: 1 / 0, lambda: ends.append(end)]
        getattr(connection, end)()
    assert ends == [end]
    assert balance(bank, "plain") == (1 if end == "commit" else 100)
    assert "ZeroDivisionError" in caplog.text


def test_another_error_does_not_doom(attached: Engine, holds: Holds, bank: Bank) -> None:
    holds.grants = [claimed(bank, 7)]
    with Session(attached) as session, session.begin():
        session.execute(NOTE)
        with pytest.raises(WrongResource) as caught, session.begin_nested():
            session.execute(update(Account).where(Account.id == 43).values(balance=1))
        with pytest.raises(DBAPIError), session.begin_nested():
            session.execute(text("select 1 / 0"))
    assert caught.value.announced == [KEY]
    assert balance(bank, "plain") == 1
    assert holds.refusals == []


def test_every_source_is_told_of_a_refusal_and_finds_out_whether_it_holds_the_grant(
    any_engine: Engine, holds: Holds, bank: Bank
) -> None:
    other = Holds(grants=[claimed(bank, 3, "account:43")])
    holds.grants = [claimed(bank, 7)]
    claimed(bank, 8, owner="newer")
    for source in (holds, other):
        attach(any_engine, source)
    with Session(any_engine) as session, pytest.raises(StaleToken):
        session.execute(WITHDRAW)
    for source in (holds, other):
        assert [(refused.resource, refused.token) for refused in source.refusals] == [(KEY, 7)]


def test_a_refused_claim_on_an_attached_engine_dooms_nothing_and_tells_nobody(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    claimed(bank, 8, owner="newer")
    with attached.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(StaleToken):
            claim(connection, KEY, 7, "a")
        holds.grants = [Claim("account:43", 3, "a")]  # under a hold of something else, too
        assert claim(connection, KEY, 9, "a").token == 9
    assert holds.refusals == []


def test_a_refusal_arrives_with_all_its_facts_and_pickles(stale: Engine) -> None:
    with Session(stale) as session, pytest.raises(StaleToken) as caught:
        session.execute(WITHDRAW)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert (copy.resource, copy.token, copy.newest, copy.table, copy.key) == (KEY, 7, 8, "public.account", None)
