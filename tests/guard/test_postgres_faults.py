"""Postgres that says nothing: a claim ends in time, and no lease is kept for the sake of one that does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import create_engine, text, update
from sqlalchemy.ext.asyncio import create_async_engine
from support.bank import KEY, Account, balance
from support.proxy import Proxy
from support.sql import Connection
from support.urls import at_port, driver, place
from support.waiting import until_async

from fenceguard import AsyncGuard, LeaseLost, StoreUnreachable
from fenceguard.fence.claim_pool import AsyncClaimPool, ClaimPool
from fenceguard.model import Grant

GRANT = Grant(KEY, "a-1", 1, 30.0, 0.0)
Proxies = Callable[[str, int], Proxy]


@pytest.fixture
def far(proxy: Proxies, database_url: str) -> tuple[Proxy, str]:
    """A link to the database, and the URL at its near end."""
    link = proxy(*place(database_url))
    return link, at_port(database_url, link.port)


def no_check(connection: Any) -> None:
    """The database is right."""


def test_a_claim_on_a_frozen_link_ends_in_time(far: tuple[Proxy, str]) -> None:
    link, url = far
    engine = create_engine(driver(url, "psycopg"))
    pool = ClaimPool(engine, check=no_check, answer_within=0.3)
    pool.claim(GRANT, wait=0.0)
    link.freeze()
    began = monotonic()
    with pytest.raises(StoreUnreachable):
        pool.claim(GRANT, wait=0.1)
    assert monotonic() - began < 5
    pool.close()
    engine.dispose()


async def test_an_async_claim_on_a_frozen_link_ends_in_time(far: tuple[Proxy, str]) -> None:
    link, url = far
    engine = create_async_engine(driver(url, "asyncpg"))
    pool = AsyncClaimPool(engine, check=no_check, answer_within=0.3)
    await pool.claim(GRANT, wait=0.0)
    link.freeze()
    began = monotonic()
    with pytest.raises(StoreUnreachable):
        await pool.claim(GRANT, wait=0.1)
    assert monotonic() - began < 5
    link.thaw()
    await pool.close()
    await engine.dispose()


async def test_a_commit_on_a_connection_made_before_the_guard_is_not_cut_by_the_loss_either(
    database_url: str, async_redis: Any, bank: Connection, prefix: str
) -> None:
    bank.execute(
        "create function wait_at_commit() returns trigger language plpgsql as "
        "$$ begin perform pg_advisory_xact_lock(7); return null; end $$;"
        "create constraint trigger slow after update on account deferrable initially deferred "
        "for each row execute function wait_at_commit()"
    )
    engine = create_async_engine(driver(database_url, "asyncpg"), pool_size=1, max_overflow=0)
    async with engine.connect() as early:
        await early.execute(text("select 1"))
    guard = AsyncGuard(async_redis, engine, ttl=10.0, prefix=prefix)
    bank.execute("select pg_advisory_lock(7)")

    async def lose_it_during_the_commit(trust: Any) -> None:
        async def is_waiting() -> bool:
            row = bank.execute("select 1 from pg_locks where locktype = 'advisory' and not granted").fetchone()
            return row is not None

        await until_async(is_waiting, "the COMMIT waits")
        trust.lose("taken_over")
        await asyncio.sleep(0)
        bank.execute("select pg_advisory_unlock(7)")

    with pytest.raises(LeaseLost):  # at the await after the COMMIT
        async with guard.hold(KEY) as held, guard.sessions()() as session:
            await session.execute(update(Account).where(Account.id == 42).values(balance=6))
            losing = asyncio.create_task(lose_it_during_the_commit(held._hold.trust))
            await session.commit()
            await asyncio.get_running_loop().create_future()
    await losing
    await guard.close()
    await engine.dispose()
    assert balance(bank, "account") == 6
