"""`unfenced`: the named way round, in transactions and on connections in AUTOCOMMIT."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from fence_talk import KEY, Holds, announced, claimed, told
from sqlalchemy import Connection, Engine, create_engine, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from support.bank import Account, balance
from support.urls import driver

from fenceguard import SchemaMissing, UnfencedWrite
from fenceguard.fence import enter, unfenced
from fenceguard.fence.session import attach

Bank = psycopg.Connection[Any]

DRIVERS = ("psycopg", "asyncpg")  # async psycopg sends what psycopg sends

WITHDRAW = update(Account).where(Account.id == 42).values(balance=1)
DEPOSIT = update(Account).where(Account.id == 43).values(balance=200)


def autocommit(engine: Engine) -> Connection:
    return engine.connect().execution_options(isolation_level="AUTOCOMMIT")


def sqlstate_of(error: UnfencedWrite | DBAPIError) -> str | None:
    return error.sqlstate if isinstance(error, UnfencedWrite) else error.orig.sqlstate  # type: ignore[union-attr]


def fence_of(bank: Bank, account: int = 42) -> int:
    return bank.execute("select fence from account where id = %s", (account,)).fetchone()[0]  # type: ignore[index]


@pytest.mark.parametrize("attaching", [attach, lambda _, __: None], ids=["attached", "not attached"])
def test_an_unfenced_block_writes_to_an_enforced_table_and_what_follows_is_refused(
    any_engine: Engine, bank: Bank, attaching: Callable[..., None]
) -> None:
    attaching(any_engine, Holds())
    with any_engine.connect() as connection:
        with connection.begin(), unfenced(connection, reason="back-fill"):
            connection.execute(WITHDRAW)
        with connection.begin(), pytest.raises((UnfencedWrite, DBAPIError)) as in_the_next:
            connection.execute(DEPOSIT)
        with connection.begin():
            with unfenced(connection, reason="back-fill"):
                pass
            with pytest.raises((UnfencedWrite, DBAPIError)) as after_the_block:
                connection.execute(DEPOSIT)
    assert [sqlstate_of(caught.value) for caught in (in_the_next, after_the_block)] == ["ZF002", "ZF002"]
    assert (balance(bank, "account", 42), balance(bank, "account", 43)) == (1, 100)


def test_a_session_writes_unfenced_and_keeps_the_old_stamp(attached: Engine, holds: Holds, bank: Bank) -> None:
    holds.grants = [claimed(bank, 7)]
    with Session(attached) as session, session.begin():
        session.execute(WITHDRAW)
        with unfenced(session, reason="correction"):
            assert announced(session) == {}
            session.execute(WITHDRAW.values(balance=2))
            session.execute(DEPOSIT)
        assert announced(session) == told(*holds.grants)
        session.execute(WITHDRAW.values(balance=3))
    assert (balance(bank, "account", 42), balance(bank, "account", 43)) == (3, 200)
    assert (fence_of(bank, 42), fence_of(bank, 43)) == (7, 0)


def test_what_was_entered_by_hand_is_announced_again_after_the_block(any_engine: Engine, bank: Bank) -> None:
    mine = claimed(bank, 7)
    with any_engine.begin() as connection:
        enter(connection, mine)
        with unfenced(connection, reason="correction"):
            connection.execute(DEPOSIT)
            assert announced(connection) == {}
        assert announced(connection) == told(mine)
        connection.execute(WITHDRAW)
    assert (fence_of(bank, 42), fence_of(bank, 43)) == (7, 0)


def test_of_nested_blocks_the_outer_one_decides_when_it_ends(attached: Engine, bank: Bank) -> None:
    with attached.begin() as connection, unfenced(connection, reason="outer"):
        with unfenced(connection, reason="inner"):
            connection.execute(WITHDRAW)
        connection.execute(DEPOSIT)
    assert balance(bank, "account", 43) == 200


def test_a_block_left_by_an_error_ends_as_well(attached: Engine, bank: Bank) -> None:
    with attached.begin() as connection:
        with suppress(LookupError), unfenced(connection, reason="correction"):
            raise LookupError
        with pytest.raises(UnfencedWrite):
            connection.execute(WITHDRAW)
    assert balance(bank, "account") == 100


@pytest.mark.usefixtures("bank")
def test_a_block_whose_transaction_was_aborted_ends_quietly(attached: Engine) -> None:
    with attached.connect() as connection:
        with pytest.raises(DBAPIError, match="division"), unfenced(connection, reason="correction"):
            connection.execute(text("select 1 / 0"))
        connection.rollback()
        with pytest.raises(UnfencedWrite):
            connection.execute(WITHDRAW)


@pytest.mark.parametrize("end", ["commit", "rollback", "close", "invalidate"])
def test_a_block_that_outlives_its_transaction_covers_no_other(attached: Engine, bank: Bank, end: str) -> None:
    with attached.connect() as connection, unfenced(connection, reason="correction"):
        connection.execute(text("select 1"))
        getattr(connection, end)()
    with attached.connect() as connection, pytest.raises(UnfencedWrite):
        connection.execute(WITHDRAW)
    assert balance(bank, "account") == 100


def test_a_connection_in_autocommit_under_a_hold_is_misuse(attached: Engine, holds: Holds, bank: Bank) -> None:
    holds.grants = [claimed(bank, 7)]
    with autocommit(attached) as connection, pytest.raises(ValueError, match=r"AUTOCOMMIT.*account:42"):
        connection.execute(text("select 1"))


def test_a_connection_in_autocommit_without_a_hold_is_left_alone(attached: Engine) -> None:
    with autocommit(attached) as connection:
        assert connection.scalar(text("select 1")) == 1


def test_in_autocommit_a_block_lifts_the_check_and_an_enforced_table_still_refuses(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    holds.grants = [claimed(bank, 7)]
    with autocommit(attached) as connection:
        with unfenced(connection, reason="look"):
            assert connection.scalar(text("select 1")) == 1
            with pytest.raises(UnfencedWrite):
                connection.execute(WITHDRAW)
        with pytest.raises(ValueError, match="AUTOCOMMIT"):
            connection.execute(text("select 1"))
    assert balance(bank, "account") == 100


def test_the_reason_is_logged_here_and_by_the_server(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    notices: list[str | None] = []
    with engine.begin() as connection, caplog.at_level(logging.WARNING, logger="fenceguard"):
        driver_connection: Any = connection.connection.driver_connection
        driver_connection.add_notice_handler(lambda notice: notices.append(notice.message_primary))
        connection.exec_driver_sql("set local client_min_messages = log")
        with unfenced(connection, reason="back-fill 2027-01"):
            pass
    assert "back-fill 2027-01" in caplog.text
    assert any("back-fill 2027-01" in (notice or "") for notice in notices)


@pytest.mark.parametrize("reason", ["", "  "])
def test_a_block_without_a_reason_is_misuse(engine: Engine, reason: str) -> None:
    with engine.connect() as connection, pytest.raises(ValueError, match="reason"):
        unfenced(connection, reason=reason)


def test_a_database_without_the_schema_names_the_command(empty_database_url: str) -> None:
    engine = create_engine(driver(empty_database_url, "psycopg"))
    with engine.begin() as connection, pytest.raises(SchemaMissing), unfenced(connection, reason="x"):
        pass
    engine.dispose()


async def test_async_sessions_and_connections_take_async_with(
    async_engine: AsyncEngine, holds: Holds, bank: Bank
) -> None:
    attach(async_engine, holds)
    holds.grants = [claimed(bank, 7, KEY)]
    async with AsyncSession(async_engine) as session, session.begin(), unfenced(session, reason="correction"):
        await session.execute(DEPOSIT)
    async with async_engine.begin() as connection:
        async with unfenced(connection, reason="correction"):
            await connection.execute(DEPOSIT.values(balance=300))
        with pytest.raises(TypeError, match="async with"), unfenced(connection, reason="x"):
            pass
    assert balance(bank, "account", 43) == 300


async def test_a_sync_session_takes_no_async_with(engine: Engine) -> None:
    with Session(engine) as session, pytest.raises(TypeError, match="`with`"):
        async with unfenced(session, reason="x"):
            pass


def test_a_block_that_has_ended_is_not_brought_back_by_a_savepoint_begun_inside_it(
    attached: Engine, bank: Bank
) -> None:
    with Session(attached) as session, session.begin():
        with unfenced(session, reason="back-fill"):
            savepoint = session.begin_nested()
            session.execute(WITHDRAW)
        savepoint.rollback()
        with pytest.raises(UnfencedWrite):
            session.execute(WITHDRAW)
    assert balance(bank, "account", 42) == 100
