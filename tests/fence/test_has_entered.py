"""Asking an open transaction whether it has entered: on its own connection, never waiting for another statement."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from fence_talk import Holds, claimed
from sqlalchemy import Engine, create_engine, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from support.bank import Account, Plain, balance
from support.sql import Connection, in_background, scalar
from support.urls import at_port, driver, place
from support.waiting import PATIENCE, until, until_async

from fenceguard.fence import attach, enter, has_entered, has_entered_async
from fenceguard.fence.announce import Announcement

WITHDRAW = update(Account).where(Account.id == 42).values(balance=1)
NOTE = update(Plain).where(Plain.id == 42).values(balance=1)
WAITING = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


def newest(holds: Holds) -> Announcement:
    """Return the transaction that the source was told of last."""
    return holds.transactions[-1]


def test_a_transaction_has_entered_from_its_first_write_to_a_fenced_table_until_it_ends(
    attached: Engine, holds: Holds, bank: Connection
) -> None:
    holds.grants = [claimed(bank, 7)]
    with attached.connect() as connection:
        connection.execute(text("select 1"))
        transaction = newest(holds)
        asked = [has_entered(transaction)]
        connection.execute(NOTE)
        asked.append(has_entered(transaction))
        connection.execute(WITHDRAW)
        asked.append(has_entered(transaction))
        connection.commit()
        asked.append(has_entered(transaction))
    assert asked == [False, False, True, False]
    assert balance(bank, "account") == 1


def test_one_that_entered_by_hand_has_entered(attached: Engine, holds: Holds, bank: Connection) -> None:
    holds.grants = [mine := claimed(bank, 7)]
    with attached.begin() as connection:
        enter(connection, mine)
        assert has_entered(newest(holds))


def test_a_savepoint_rolled_back_takes_the_entering_with_it(
    attached: Engine, holds: Holds, bank: Connection
) -> None:
    holds.grants = [claimed(bank, 7)]
    with attached.begin() as connection:
        savepoint = connection.begin_nested()
        connection.execute(WITHDRAW)
        before = has_entered(newest(holds))
        savepoint.rollback()
        after = has_entered(newest(holds))
    assert (before, after) == (True, False)


def test_asking_is_no_statement_of_the_transaction(attached: Engine, holds: Holds, bank: Connection) -> None:
    holds.grants = [claimed(bank, 7)]
    with attached.begin() as connection:
        connection.execute(text("select 1"))
        told = len(holds.transactions)
        has_entered(newest(holds))
        connection.execute(WITHDRAW)
    assert len(holds.transactions) == told + 1
    assert balance(bank, "account") == 1


def test_an_aborted_one_counts_as_entered(attached: Engine, holds: Holds, bank: Connection) -> None:
    holds.grants = [claimed(bank, 7)]
    with attached.connect() as connection:
        with suppress(DBAPIError):
            connection.execute(text("select 1 / 0"))
        aborted = has_entered(newest(holds))
        connection.rollback()
        rolled_back = has_entered(newest(holds))
    assert (aborted, rolled_back) == (True, False)


def test_one_that_was_ended_in_sql_has_not_entered(attached: Engine, holds: Holds, bank: Connection) -> None:
    holds.grants = [claimed(bank, 7)]
    with attached.connect() as connection:
        connection.execute(WITHDRAW)
        connection.exec_driver_sql("commit")
        assert not has_entered(newest(holds))


def test_one_whose_connection_was_cut_counts_as_entered_until_it_is_rolled_back(
    attached: Engine, holds: Holds, bank: Connection
) -> None:
    holds.grants = [claimed(bank, 7)]
    with attached.connect() as connection:
        pid = connection.scalar(text("select pg_backend_pid()"))
        bank.execute("select pg_terminate_backend(%s, 5000)", (pid,))
        cut = has_entered(newest(holds))
        with suppress(DBAPIError):
            connection.execute(text("select 1"))
        noticed = has_entered(newest(holds))
        connection.rollback()
        rolled_back = has_entered(newest(holds))
    assert (cut, noticed, rolled_back) == (True, True, False)


@pytest.mark.parametrize("any_engine", ["psycopg"], indirect=True)
def test_one_that_was_collected_unended_has_not_entered(attached: Engine, holds: Holds, bank: Connection) -> None:
    """What is kept of a transaction keeps no connection out of its pool."""
    holds.grants = [claimed(bank, 7)]
    connection = attached.connect()
    connection.execute(WITHDRAW)
    transaction = newest(holds)
    open_ = has_entered(transaction)
    del connection
    gc.collect()
    assert (open_, has_entered(transaction)) == (True, False)
    assert attached.pool.checkedin() == 1  # type: ignore[attr-defined] # of a QueuePool
    assert balance(bank, "account") == 100


def test_one_that_runs_a_statement_in_another_thread_counts_as_entered_at_once(
    database_url: str, holds: Holds, bank: Connection
) -> None:
    engine = create_engine(driver(database_url, "psycopg"))
    attach(engine, holds)
    holds.grants = [claimed(bank, 7)]
    with engine.connect() as connection, in_background() as submit:
        with bank.transaction(force_rollback=True):
            bank.execute("update plain set balance = 2 where id = 42")
            writing = submit(connection.execute, NOTE)
            until(lambda: scalar(bank, WAITING))
            busy = submit(has_entered, newest(holds)).result(PATIENCE)
            still_writing = not writing.done()
        writing.result(PATIENCE)
        idle = has_entered(newest(holds))
    engine.dispose()
    assert (busy, still_writing, idle) == (True, True, False)


# -- async


@pytest.fixture(params=["asyncpg", "psycopg_async"])
async def served(request: pytest.FixtureRequest, database_url: str, holds: Holds) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(driver(database_url, request.param))
    attach(engine, holds)
    yield engine
    await engine.dispose()


async def test_one_that_runs_a_statement_in_another_task_counts_as_entered_at_once(
    served: AsyncEngine, holds: Holds, bank: Connection
) -> None:
    holds.grants = [claimed(bank, 7)]

    async def waits() -> bool:
        return bool(scalar(bank, WAITING))

    async with asyncio.timeout(PATIENCE), served.connect() as connection:
        with bank.transaction(force_rollback=True):
            bank.execute("update plain set balance = 2 where id = 42")
            writing = asyncio.create_task(connection.execute(NOTE))
            await until_async(waits)
            busy = await has_entered_async(newest(holds))
            still_writing = not writing.done()
        await writing
        idle = await has_entered_async(newest(holds))
    assert (busy, still_writing, idle) == (True, True, False)


async def test_one_of_another_event_loop_is_not_asked_and_counts_as_entered(
    served: AsyncEngine, holds: Holds, bank: Connection
) -> None:
    holds.grants = [claimed(bank, 7)]
    async with served.connect() as connection:
        await connection.execute(text("select 1"))
        here = await has_entered_async(newest(holds))
        elsewhere = await asyncio.to_thread(lambda: asyncio.run(has_entered_async(newest(holds))))
        nowhere = await asyncio.to_thread(has_entered, newest(holds))
    assert (here, elsewhere, nowhere) == (False, True, True)


async def test_one_of_an_asyncpg_connection_made_before_counts_as_entered(
    async_engine: AsyncEngine, holds: Holds, bank: Connection
) -> None:
    async with async_engine.connect() as connection:
        await connection.execute(text("select 1"))
    attach(async_engine, holds)
    holds.grants = [claimed(bank, 7)]
    async with async_engine.connect() as connection:
        await connection.execute(text("select 1"))
        assert await has_entered_async(newest(holds))


@pytest.fixture(params=["asyncpg", "psycopg_async"])
async def linked(
    request: pytest.FixtureRequest, database_url: str, holds: Holds, proxy: Any
) -> AsyncIterator[tuple[AsyncEngine, Any]]:
    link = proxy(*place(database_url))
    engine = create_async_engine(driver(at_port(database_url, link.port), request.param))
    attach(engine, holds)
    yield engine, link
    await engine.dispose()


async def test_a_commit_meanwhile_waits_for_the_answer(
    linked: tuple[AsyncEngine, Any], holds: Holds, bank: Connection
) -> None:
    engine, link = linked
    holds.grants = [claimed(bank, 7)]
    async with engine.connect() as connection:
        await connection.execute(WITHDRAW)
        link.freeze()
        asking = asyncio.create_task(has_entered_async(newest(holds)))
        second = asyncio.create_task(has_entered_async(newest(holds)))  # finds the connection busy
        assert await second
        commit = asyncio.create_task(connection.commit())
        await asyncio.sleep(0)
        assert not asking.done()
        link.thaw()
        await asyncio.gather(asking, commit)
    assert balance(bank, "account") == 1


async def test_a_statement_meanwhile_waits_for_the_answer(
    linked: tuple[AsyncEngine, Any], holds: Holds, bank: Connection
) -> None:
    engine, link = linked
    holds.grants = [claimed(bank, 7)]
    async with engine.begin() as connection:
        await connection.execute(text("select 1"))
        link.freeze()
        asking = asyncio.create_task(has_entered_async(newest(holds)))
        assert await asyncio.create_task(has_entered_async(newest(holds)))
        writing = asyncio.create_task(connection.execute(WITHDRAW))
        await asyncio.sleep(0)
        link.thaw()
        assert not await asking
        await writing
    assert balance(bank, "account") == 1


async def test_a_cancelled_question_leaves_the_transaction_as_it_was(
    linked: tuple[AsyncEngine, Any], holds: Holds, bank: Connection
) -> None:
    engine, link = linked
    holds.grants = [claimed(bank, 7)]
    async with engine.begin() as connection:
        await connection.execute(WITHDRAW)
        link.freeze()
        asking = asyncio.create_task(has_entered_async(newest(holds)))
        assert await asyncio.create_task(has_entered_async(newest(holds)))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        link.thaw()
        await connection.execute(NOTE)
    assert (balance(bank, "account"), balance(bank, "plain")) == (1, 1)
