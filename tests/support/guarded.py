"""The bank of `support.bank`, guards on real servers, and what they keep in Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from fenceguard import AsyncGuard, Guard
from fenceguard.lease.scripts import Keys
from support.bank import KEY, open_bank
from support.sql import Connect, Connection


def lease_key(prefix: str) -> bytes:
    """Return where the lease on account 42 is."""
    return keys(prefix)[0]


def keys(prefix: str) -> tuple[bytes, bytes]:
    """Return where the lease on account 42 and its counter are."""
    return Keys(prefix).of(KEY)


@pytest.fixture
def bank(pg: Connect) -> Connection:
    """A connection of the test's own to a database with both tables."""
    connection = pg()
    open_bank(connection)
    return connection


@pytest.fixture
def make_guard(redis_client: Redis, engine: Engine, prefix: str) -> Iterator[Callable[..., Guard]]:
    """A factory of guards on the test's servers; options as `Guard`'s."""
    with ExitStack() as stack:

        def make(**options: Any) -> Guard:
            redis = options.pop("redis", redis_client)
            guard = Guard(redis, options.pop("engine", engine), **{"prefix": prefix, "ttl": 10.0, **options})
            stack.callback(guard.close)
            return guard

        yield make


@pytest.fixture
async def make_async_guard(
    async_redis: AsyncRedis, async_engine: AsyncEngine, prefix: str
) -> AsyncIterator[Callable[..., AsyncGuard]]:
    """A factory of async guards on the test's servers; options as `AsyncGuard`'s."""
    async with AsyncExitStack() as stack:

        def make(**options: Any) -> AsyncGuard:
            redis = options.pop("redis", async_redis)
            engine = options.pop("engine", async_engine)
            guard = AsyncGuard(redis, engine, **{"prefix": prefix, "ttl": 10.0, **options})
            stack.push_async_callback(guard.close)
            return guard

        yield make
