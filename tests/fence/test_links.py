"""How the announcement travels: with BEGIN, without a statement of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from typing import Any

import asyncpg
import psycopg
import pytest
from fence_talk import KEY, Holds, announced, claimed, told
from sqlalchemy import Engine, create_engine, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import await_
from support.bank import Account, balance
from support.urls import at_port, driver, place

from fenceguard import Claim
from fenceguard.fence.announce import CursorLink, setting
from fenceguard.fence.announce_psycopg import PsycopgLink
from fenceguard.fence.session import attach

Bank = psycopg.Connection[Any]

SEVEN = Claim(KEY, 7, "a")
WITHDRAW = update(Account).where(Account.id == 42).values(balance=1)


def test_the_setting_is_ascii_without_a_percent_sign() -> None:
    statement = setting({"100% 'ünï' \\": (7, "a")})
    assert statement.isascii()
    assert "%" not in statement


def test_nothing_held_is_announced_as_the_empty_text() -> None:
    assert setting({}) == "set local fenceguard.grants = E''"


# -- what the server is sent


def sent_in_a_transaction(engine: Engine) -> list[str]:
    """Return what the server gets for two statements and a commit, by its own log, which it sends as notices."""
    seen: list[str] = []
    with engine.connect() as connection:
        driver_connection: Any = connection.connection.driver_connection
        if engine.dialect.driver == "asyncpg":
            driver_connection.add_log_listener(lambda _, message: seen.append(message.message))
        else:
            driver_connection.add_notice_handler(lambda message: seen.append(message.message_primary))
        connection.exec_driver_sql("set client_min_messages = log")
        connection.exec_driver_sql("set log_statement = 'all'")
        connection.commit()
        seen.clear()
        connection.execute(text("select 1"))
        connection.execute(text("select 2"))
        connection.commit()
        if engine.dialect.is_async:
            await_(asyncio.sleep(0))  # asyncpg calls its listeners soon
    return [message.partition(": ")[2].rstrip(";").lower() for message in seen]


def test_the_announcement_travels_in_one_message_with_begin(attached: Engine, holds: Holds) -> None:
    plain = sent_in_a_transaction(attached)
    holds.grants = [SEVEN]
    sent = sent_in_a_transaction(attached)
    assert plain == ["begin", "select 1", "select 2", "commit"]
    assert sent == [f"begin; {setting({KEY: (7, 'a')})}".lower(), "select 1", "select 2", "commit"]


def test_nothing_is_added_where_nothing_is_held(any_engine: Engine, holds: Holds) -> None:
    unattached = sent_in_a_transaction(any_engine)
    attach(any_engine, holds)
    any_engine.dispose()
    assert sent_in_a_transaction(any_engine) == unattached


# -- asyncpg


async def test_an_asyncpg_connection_made_before_announces_by_a_statement(
    async_engine: AsyncEngine, holds: Holds
) -> None:
    async with async_engine.connect() as connection:
        await connection.execute(text("select 1"))
    attach(async_engine, holds)
    holds.grants = [SEVEN]
    async with async_engine.begin() as connection:
        assert await connection.run_sync(announced) == told(SEVEN)


async def test_a_connection_class_of_one_s_own_is_kept_and_announces(database_url: str, holds: Holds) -> None:
    class Own(asyncpg.Connection):  # type: ignore[misc] # untyped
        pass

    engine = create_async_engine(driver(database_url, "asyncpg"), connect_args={"connection_class": Own})
    attach(engine, holds)
    holds.grants = [SEVEN]
    async with engine.begin() as connection:
        assert issubclass(type((await connection.get_raw_connection()).driver_connection), Own)
        assert await connection.run_sync(announced) == told(SEVEN)
    await engine.dispose()


async def test_a_creator_of_one_s_own_announces_by_a_statement(database_url: str, holds: Holds) -> None:
    engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(database_url))
    attach(engine, holds)
    holds.grants = [SEVEN]
    async with engine.begin() as connection:
        assert await connection.run_sync(announced) == told(SEVEN)
    await engine.dispose()


async def test_a_cancelled_begin_leaves_nothing_announced(database_url: str, holds: Holds, proxy: Any) -> None:
    """The task is cancelled while BEGIN and announcement are on a frozen link."""
    link = proxy(*place(database_url))
    engine = create_async_engine(driver(at_port(database_url, link.port), "asyncpg"), pool_size=1)
    attach(engine, holds)
    async with engine.connect() as connection:
        await connection.execute(text("select 1"))
    holds.grants = [SEVEN]
    link.freeze()
    async with engine.connect() as connection:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.execute(text("select 1"))
        link.thaw()
    holds.grants = []
    async with engine.connect() as connection:
        assert await connection.run_sync(announced) == {}
    await engine.dispose()


async def test_an_announcement_that_no_begin_has_carried_is_forgotten(
    async_engine: AsyncEngine, holds: Holds
) -> None:
    attach(async_engine, holds)
    async with async_engine.connect() as connection:
        driver_connection: Any = (await connection.get_raw_connection()).driver_connection
        for end in (connection.begin, connection.rollback):
            driver_connection.pending = (setting({KEY: (7, "a")}), lambda: None)
            await end()
            assert driver_connection.pending is None


# -- COMMIT


class Watcher(Holds):
    """A source that watches COMMITs."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.begun_commit = asyncio.Event()

    @contextmanager
    def committing(self) -> Generator[None]:
        self.events.append("committing")
        self.begun_commit.set()
        yield
        self.events.append("committed")


@pytest.fixture(params=["asyncpg", "psycopg_async"])
async def watched(request: pytest.FixtureRequest, database_url: str) -> AsyncIterator[tuple[AsyncEngine, Watcher]]:
    engine, watcher = create_async_engine(driver(database_url, request.param)), Watcher()
    attach(engine, watcher)
    yield engine, watcher
    await engine.dispose()


async def test_a_source_is_told_while_a_commit_is_under_way(
    watched: tuple[AsyncEngine, Watcher], bank: Bank
) -> None:
    engine, watcher = watched
    watcher.grants = [claimed(bank, 7)]
    bank.execute(
        "create function wait() returns trigger language plpgsql"
        " as 'begin perform pg_advisory_xact_lock(1); return null; end'"
    )
    bank.execute(
        "create constraint trigger wait after update on account deferrable initially deferred"
        " for each row execute function wait()"
    )
    async with engine.connect() as connection:
        await connection.execute(WITHDRAW)
        with bank.transaction():
            bank.execute("select pg_advisory_xact_lock(1)")
            commit = asyncio.create_task(connection.commit())
            await watcher.begun_commit.wait()
            assert watcher.events == ["committing"]
            assert balance(bank, "account") == 100
        await commit
    assert watcher.events == ["committing", "committed"]
    assert balance(bank, "account") == 1


async def test_a_rollback_is_no_commit(watched: tuple[AsyncEngine, Watcher]) -> None:
    engine, watcher = watched
    async with engine.connect() as connection:
        await connection.execute(text("select 1"))
        await connection.rollback()
    assert watcher.events == []


# -- psycopg


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_psycopg_begins_with_the_options_of_its_connection(engine: Engine, holds: Holds, level: Any) -> None:
    attach(engine, holds)
    holds.grants = [SEVEN]
    options: dict[str, Any] = {"isolation_level": level, "postgresql_readonly": True, "postgresql_deferrable": True}
    with engine.connect().execution_options(**options) as connection:
        connection.execute(text("select 1"))
        shown = [
            connection.scalar(text(f"show transaction_{name}")) for name in ("isolation", "read_only", "deferrable")
        ]
    assert shown == [level.lower(), "on", "on"]


@pytest.mark.parametrize("any_engine", ["psycopg", "psycopg_async"], indirect=True)
def test_a_begin_that_the_server_refuses_comes_as_the_driver_s_error_and_leaves_the_connection_idle(
    any_engine: Engine,
) -> None:
    with any_engine.connect() as connection:
        proxied, done = connection.connection, list[bool]()
        with pytest.raises(psycopg.errors.UndefinedObject):
            PsycopgLink().send(proxied, "set local nosuch_setting = 1", lambda: done.append(True))
        proxied.rollback()
        assert done == []
        assert connection.scalar(text("select 1")) == 1


def test_any_other_driver_is_told_by_a_cursor(any_engine: Engine) -> None:
    link = CursorLink()
    with any_engine.connect() as connection:
        arguments: dict[str, Any] = {}
        link.prepare_connect(arguments)
        link.send(connection.connection, setting({KEY: (7, "a")}), lambda: arguments.update(done=True))
        assert link.in_transaction(connection.connection) is None
        link.forget(connection.connection)
        assert link.has_entered(connection.connection) is None
        assert announced(connection) == told(SEVEN)
    assert arguments == {"done": True}


def test_a_connection_that_was_cut_is_reported_as_one(database_url: str, bank: Bank, holds: Holds) -> None:
    engine = create_engine(driver(database_url, "psycopg"))
    attach(engine, holds)
    holds.grants = [SEVEN]
    with engine.connect() as connection:
        pid = connection.scalar(text("select pg_backend_pid()"))
        connection.rollback()
        bank.execute("select pg_terminate_backend(%s, 5000)", (pid,))
        with pytest.raises(DBAPIError) as caught:
            connection.execute(text("select 1"))
        connection.rollback()
        assert announced(connection) == told(SEVEN)
    engine.dispose()
    assert caught.value.connection_invalidated
