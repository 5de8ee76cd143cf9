"""`claim` and `enter`, and the named errors of a database that cannot serve them."""

from __future__ import annotations

import threading
from socket import socket
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from fence_talk import KEY, Holds, announced, claimed, told
from sqlalchemy import Connection, Engine, create_engine, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Session
from support.bank import Account, Plain, balance
from support.sql import until, until_waiting
from support.urls import at_port, driver, place, with_password

from fenceguard import (
    Claim,
    ClaimTimeout,
    NotClaimed,
    SchemaMissing,
    StaleToken,
    StoreUnreachable,
    TooManyResources,
    TransactionTooOld,
)
from fenceguard.fence import claim, enter
from fenceguard.fence.refusals import unreachable
from fenceguard.fence.session import attach

Bank = psycopg.Connection[Any]

DRIVERS = ("psycopg", "asyncpg")  # async psycopg sends what psycopg sends

WITHDRAW = update(Account).where(Account.id == 42).values(balance=1)
NOTE = update(Plain).where(Plain.id == 42).values(balance=1)


def autocommit(engine: Engine) -> Connection:
    return engine.connect().execution_options(isolation_level="AUTOCOMMIT")


def fence_of(bank: Bank, resource: str = KEY) -> tuple[int, str] | None:
    return bank.execute("select token, owner from fenceguard.fence where resource = %s", (resource,)).fetchone()


def test_a_claim_raises_the_fence(any_engine: Engine, bank: Bank) -> None:
    with autocommit(any_engine) as connection:
        made = claim(connection, KEY, 7, "a")
        assert not connection.in_transaction()
    assert made == Claim(KEY, 7, "a")
    assert fence_of(bank) == (7, "a")


def test_a_claim_sent_again_by_its_owner_is_recognised(any_engine: Engine, bank: Bank) -> None:
    with autocommit(any_engine) as connection:
        assert claim(connection, KEY, 7, "a") == claim(connection, KEY, 7, "a", wait=0)
    assert fence_of(bank) == (7, "a")


@pytest.mark.parametrize(("token", "owner"), [(7, "b"), (6, "a"), (6, "b")])
def test_a_claim_at_or_below_the_fence_is_refused_and_names_the_newest(
    any_engine: Engine, bank: Bank, token: int, owner: str
) -> None:
    claimed(bank, 7)
    with autocommit(any_engine) as connection, pytest.raises(StaleToken) as caught:
        claim(connection, KEY, token, owner)
    refused = caught.value
    assert refused.__cause__.sqlstate == "ZF001"  # type: ignore[union-attr]
    assert (refused.resource, refused.token, refused.newest, refused.owner) == (KEY, token, 7, "a")
    assert fence_of(bank) == (7, "a")


@pytest.mark.case(
    "case 39: a claimer frozen between its claim and COMMIT", control="none: a claim is one autocommit statement"
)
def test_a_claim_in_a_transaction_is_misuse_and_changes_nothing(any_engine: Engine, bank: Bank) -> None:
    with any_engine.connect() as connection, pytest.raises(ValueError, match="AUTOCOMMIT"):
        claim(connection, KEY, 7, "a")
    assert fence_of(bank) is None


def test_an_engine_in_autocommit_will_do_for_a_claim(any_engine: Engine, bank: Bank) -> None:
    with any_engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        claim(connection, KEY, 7, "a")
    assert fence_of(bank) == (7, "a")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("", 7, "a"), ValueError),
        (("x\ny", 7, "a"), ValueError),
        (("x" * 513, 7, "a"), ValueError),
        ((KEY, 0, "a"), ValueError),
        ((KEY, 2**53, "a"), ValueError),
        ((KEY, True, "a"), TypeError),
        ((KEY, "7", "a"), TypeError),
        ((KEY, 7, ""), ValueError),
        ((7, 7, "a"), TypeError),
    ],
)
def test_a_claim_of_what_is_no_resource_token_or_owner_is_misuse(
    engine: Engine, arguments: tuple[Any, Any, Any], error: type[Exception]
) -> None:
    with autocommit(engine) as connection, pytest.raises(error):
        claim(connection, *arguments)


@pytest.mark.parametrize("wait", [-1.0, float("nan"), float("inf")])
def test_a_wait_that_is_no_duration_is_misuse(engine: Engine, wait: float) -> None:
    with autocommit(engine) as connection, pytest.raises(ValueError, match="wait"):
        claim(connection, KEY, 7, "a", wait=wait)


async def test_a_claim_on_an_async_connection_says_how_to_call_it(async_engine: AsyncEngine, bank: Bank) -> None:
    async with async_engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(TypeError, match="run_sync"):
            claim(connection, KEY, 7, "a")  # type: ignore[arg-type]
        await connection.run_sync(claim, KEY, 7, "a")
    assert fence_of(bank) == (7, "a")


@pytest.mark.parametrize("wait", [0, 0.05])
def test_a_claim_that_may_not_wait_longer_names_the_transaction_in_the_way(
    any_engine: Engine, bank: Bank, wait: float
) -> None:
    mine = claimed(bank, 7)
    with bank.transaction():
        bank.execute("select fenceguard.enter(%s, %s, %s)", (KEY, mine.token, mine.owner))
        with autocommit(any_engine) as connection:
            with pytest.raises(ClaimTimeout) as caught:
                claim(connection, KEY, 8, "b", wait=wait)
            timed_out = caught.value
            assert connection.scalar(text("show lock_timeout")) == "0"
    assert timed_out.resource == KEY
    assert timed_out.waited >= wait
    assert len(timed_out.holders) == 1
    assert f"pid {bank.info.backend_pid}" in timed_out.holders[0]
    assert fence_of(bank) == (7, "a")


def test_a_role_that_may_claim_but_not_look_is_told_of_the_timeout_alone(engine: Engine, bank: Bank) -> None:
    role = "pg_monitor"  # a role that every server has; its grants go with the database
    mine = claimed(bank, 7)
    bank.execute(f"grant usage on schema fenceguard to {role}")
    with autocommit(engine) as connection, autocommit(engine) as admin, bank.transaction(force_rollback=True):
        bank.execute("select fenceguard.enter(%s, %s, %s)", (KEY, mine.token, mine.owner))
        connection.execute(text(f"set role {role}"))
        with pytest.raises(DBAPIError) as refused:
            claim(connection, KEY, 8, "b", wait=0)
        admin.execute(text(f"grant execute on function fenceguard.claim to {role}"))
        with pytest.raises(ClaimTimeout) as caught:
            claim(connection, KEY, 8, "b", wait=0)
        connection.execute(text("reset role"))
    assert refused.value.orig.sqlstate == "42501"  # type: ignore[union-attr]
    assert caught.value.holders == []


def test_without_a_wait_the_session_s_lock_timeout_rules(any_engine: Engine, bank: Bank) -> None:
    mine = claimed(bank, 7)
    with bank.transaction():
        bank.execute("select fenceguard.enter(%s, %s, %s)", (KEY, mine.token, mine.owner))
        with autocommit(any_engine) as connection:
            connection.execute(text("set lock_timeout = '50ms'"))
            with pytest.raises(ClaimTimeout):
                claim(connection, KEY, 8, "b")


def test_a_role_s_shorter_statement_timeout_names_the_transaction_in_the_way_too(
    engine: Engine, bank: Bank
) -> None:
    mine = claimed(bank, 7)
    with bank.transaction():
        bank.execute("select fenceguard.enter(%s, %s, %s)", (KEY, mine.token, mine.owner))
        with autocommit(engine) as connection:
            connection.execute(text("set statement_timeout = '50ms'"))
            with pytest.raises(ClaimTimeout) as caught:
                claim(connection, KEY, 8, "b", wait=5)
    assert f"pid {bank.info.backend_pid}" in caught.value.holders[0]


def test_a_claim_waits_for_the_transaction_in_the_way(engine: Engine, bank: Bank, pg: Any) -> None:
    mine = claimed(bank, 7)
    claims: list[Claim] = []
    with autocommit(engine) as connection:
        waiter: Any = connection.connection.driver_connection

        def wait() -> None:
            claims.append(claim(connection, KEY, 8, "b", wait=20))

        with bank.transaction():
            bank.execute("select fenceguard.enter(%s, %s, %s)", (KEY, mine.token, mine.owner))
            thread = threading.Thread(target=wait)
            thread.start()
            until_waiting(pg(), waiter)
            assert fence_of(bank) == (7, "a")
        thread.join(20)
    assert claims == [Claim(KEY, 8, "b")]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_claim_under_another_default_isolation_level_is_repeated_until_it_is_answered(
    database_url: str, bank: Bank, pg: Any, level: str
) -> None:
    """Its snapshot is older than the gate that it waited for: 40001, which says nothing about the fence."""
    claimed(bank, 5)
    engine = create_engine(
        driver(database_url, "psycopg"),
        connect_args={"options": f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"},
    )
    claims: list[Claim] = []
    with autocommit(engine) as connection:
        assert connection.scalar(text("show transaction_isolation")) == level

        def wait() -> None:
            claims.append(claim(connection, KEY, 8, "b", wait=20))

        with bank.transaction():
            bank.execute("select fenceguard.claim(%s, 7, 'c')", (KEY,))
            thread = threading.Thread(target=wait)
            thread.start()
            until_waiting(pg(), connection.connection.driver_connection)  # type: ignore[arg-type] # psycopg's
        thread.join(20)
    engine.dispose()
    assert claims == [Claim(KEY, 8, "b")]


# -- enter


def test_entering_proves_the_claim_and_keeps_a_newer_claim_waiting(any_engine: Engine, bank: Bank) -> None:
    mine = claimed(bank, 7)
    with any_engine.begin() as connection:
        enter(connection, mine)
        assert announced(connection) == told(mine)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            bank.execute("select fenceguard.claim(%s, 8, 'b', 0)", (KEY,))
    claimed(bank, 8, owner="b")


def test_entering_under_an_old_token_is_refused_and_without_it_the_write_lands(
    any_engine: Engine, bank: Bank
) -> None:
    mine = claimed(bank, 7)
    claimed(bank, 8, owner="newer")
    with any_engine.begin() as connection:
        connection.execute(NOTE)
    with any_engine.begin() as connection, pytest.raises(StaleToken) as caught:
        enter(connection, mine)
    assert caught.value.__cause__.sqlstate == "ZF001"  # type: ignore[union-attr]
    assert balance(bank, "plain") == 1


def test_entering_what_was_never_claimed_is_refused(any_engine: Engine) -> None:
    with any_engine.begin() as connection, pytest.raises(NotClaimed):
        enter(connection, Claim(KEY, 7, "a"))


def test_entering_with_an_older_snapshot_than_the_claim_is_refused(any_engine: Engine, bank: Bank) -> None:
    with any_engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        connection.execute(text("select 1"))
        mine = claimed(bank, 7)
        with pytest.raises(TransactionTooOld):
            enter(connection, mine)


def test_the_sixty_fifth_resource_of_a_transaction_is_refused(any_engine: Engine, bank: Bank) -> None:
    with any_engine.begin() as connection:
        for number in range(64):
            enter(connection, claimed(bank, 7, f"r{number}"))
        with pytest.raises(TooManyResources) as caught:
            enter(connection, claimed(bank, 7, "one too many"))
    assert (caught.value.count, caught.value.limit) == (65, 64)


def test_a_session_enters_too(any_engine: Engine, bank: Bank) -> None:
    with Session(any_engine) as session, session.begin():
        enter(session, claimed(bank, 7))
        session.execute(WITHDRAW)
    assert balance(bank, "account") == 1


@pytest.mark.parametrize("options", [{}, {"isolation_level": "AUTOCOMMIT"}])
def test_entering_outside_a_transaction_is_misuse(any_engine: Engine, bank: Bank, options: dict[str, Any]) -> None:
    mine = claimed(bank, 7)
    with any_engine.connect().execution_options(**options) as connection:
        with pytest.raises(ValueError, match="transaction"):
            enter(connection, mine)
        if options:
            connection.execute(text("select 1"))
            with pytest.raises(ValueError, match="AUTOCOMMIT"):
                enter(connection, mine)


def test_what_was_entered_by_hand_stays_announced_beside_the_context_until_the_end(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    by_hand, held = claimed(bank, 7), claimed(bank, 3, "account:43")
    with attached.connect() as connection:
        with connection.begin():
            savepoint = connection.begin_nested()
            enter(connection, by_hand)
            holds.grants = [held]
            assert announced(connection) == told(by_hand, held)
            savepoint.rollback()
            assert announced(connection) == told(by_hand, held)
            holds.grants = []
            assert announced(connection) == told(by_hand)
            connection.execute(WITHDRAW)
        assert announced(connection) == {}
    assert balance(bank, "account") == 1


def test_a_stale_open_transaction_cannot_write_after_the_claim_has_returned(attached: Engine, bank: Bank) -> None:
    """It read before the claim; it enters at its first write, and that is after."""
    mine = claimed(bank, 7)
    with attached.connect() as connection:
        connection.execute(text("select 1"))
        claimed(bank, 8, owner="newer")
        connection.execute(NOTE)
        with pytest.raises(StaleToken):
            enter(connection, mine)
    assert balance(bank, "plain") == 100


# -- a database that cannot serve


def test_a_database_without_the_schema_names_the_command(empty_database_url: str) -> None:
    engine = create_engine(driver(empty_database_url, "psycopg"))
    with autocommit(engine) as connection, pytest.raises(SchemaMissing) as claiming:
        claim(connection, KEY, 7, "a")
    with engine.begin() as connection, pytest.raises(SchemaMissing) as entering:
        enter(connection, Claim(KEY, 7, "a"))
    engine.dispose()
    assert "fenceguard migrate up" in claiming.value.remedy
    assert "fenceguard migrate up" in entering.value.remedy


async def test_a_database_without_the_schema_names_the_command_under_asyncpg(empty_database_url: str) -> None:
    engine = create_async_engine(driver(empty_database_url, "asyncpg"))
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(SchemaMissing) as caught:
            await connection.run_sync(claim, KEY, 7, "a")
    await engine.dispose()
    assert "fenceguard migrate up" in caught.value.remedy


def test_a_statement_that_calls_a_missing_fenceguard_function_names_the_command(
    empty_database_url: str, holds: Holds
) -> None:
    engine = create_engine(driver(empty_database_url, "psycopg"))
    attach(engine, holds)
    with engine.connect() as connection, pytest.raises(SchemaMissing):
        connection.execute(text("select :one, fenceguard.version()"), {"one": 1})
    with engine.connect() as connection, pytest.raises(DBAPIError) as other:
        connection.execute(text("select nosuch.version()"))
    engine.dispose()
    assert other.value.orig.sqlstate == "3F000"  # type: ignore[union-attr]


def test_another_s_use_of_our_sqlstate_stays_the_driver_s_error(attached: Engine, holds: Holds) -> None:
    with attached.connect() as connection, pytest.raises(DBAPIError) as caught:
        connection.execute(text("do $$ begin raise exception using errcode = 'ZF001'; end $$"))
    assert caught.value.orig.sqlstate == "ZF001"  # type: ignore[union-attr]
    assert holds.refusals == []


def test_a_table_without_its_fence_column_names_the_operation(attached: Engine, bank: Bank) -> None:
    bank.execute("select fenceguard.drop_fence('account')")
    with Session(attached) as session, pytest.raises(SchemaMissing) as reading:
        session.get_one(Account, 42)
    with Session(attached) as session, pytest.raises(SchemaMissing) as writing:
        session.execute(update(Account).where(Account.id == 42, Account.balance == 100).values(fence=1))
    with Session(attached) as session, pytest.raises(DBAPIError) as other:
        session.execute(text("select nosuch from account"))
    assert "account" in reading.value.problem
    assert "op.add_fence('account'" in writing.value.remedy
    assert other.value.orig.sqlstate == "42703"  # type: ignore[union-attr]


def test_a_connection_cut_during_a_claim_is_an_unreachable_store_and_the_claim_may_be_sent_again(
    database_url: str, bank: Bank, proxy: Any
) -> None:
    link = proxy(*place(database_url))
    engine = create_engine(driver(at_port(database_url, link.port), "psycopg"))
    with autocommit(engine) as connection:
        link.swallow_next_reply()
        with pytest.raises(StoreUnreachable) as caught:
            claim(connection, KEY, 7, "a")
        until(lambda: fence_of(bank) == (7, "a"))
        assert claim(connection, KEY, 7, "a") == Claim(KEY, 7, "a")
    engine.dispose()
    assert caught.value.store == "postgres"
    assert not password_of(database_url) or password_of(database_url) not in str(caught.value)


@pytest.mark.parametrize("name", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("fault", ["no server", "no database", "wrong password"])
async def test_a_server_that_does_not_serve_is_named_without_the_password(
    database_url: str, name: str, fault: str
) -> None:
    with socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and not listened on
        url = {
            "no server": at_port(database_url, nobody.getsockname()[1]),
            "no database": database_url + "_nosuch",
            "wrong password": with_password(database_url, "sesame"),
        }[fault]
        error = await failure_to_connect(driver(url, name))
    assert isinstance(error, StoreUnreachable)
    assert error.store == "postgres"
    assert "sesame" not in str(error)
    assert not password_of(database_url) or password_of(database_url) not in str(error)


async def failure_to_connect(url: str) -> StoreUnreachable | None:
    if "+psycopg" in url:
        with pytest.raises((DBAPIError, OSError)) as caught:
            create_engine(url).connect()
    else:
        with pytest.raises((DBAPIError, OSError)) as caught:
            await create_async_engine(url).connect()
    return unreachable(caught.value)


def password_of(url: str) -> str:
    return urlsplit(url).password or ""


def test_an_error_that_is_an_answer_is_no_unreachable_store(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(DBAPIError) as caught:
        connection.execute(text("select 1 / 0"))
    assert unreachable(caught.value) is None
    assert unreachable(LookupError("else")) is None


def test_a_pool_without_a_free_connection_is_an_unreachable_store(database_url: str) -> None:
    engine = create_engine(driver(database_url, "psycopg"), pool_size=1, max_overflow=0, pool_timeout=0.01)
    with engine.connect(), pytest.raises(Exception, match="QueuePool") as caught:
        engine.connect()
    engine.dispose()
    assert isinstance(unreachable(caught.value), StoreUnreachable)
