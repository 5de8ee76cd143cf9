"""The pools on which guards claim: their check, and what becomes of a driver's error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from support.urls import driver

from fenceguard import Claim, Grant, StaleToken, StoreUnreachable
from fenceguard.fence.claim_pool import AsyncClaimPool, Check, ClaimPool

GRANT = Grant("account:42", "a", 7, 30.0, 0.0)

Claiming: TypeAlias = Callable[[Check], Awaitable[Claim]]


def no_check(connection: Connection) -> None:
    """Find everything in order."""


def divide(connection: Connection) -> None:
    connection.execute(text("select 1 / 0"))


@pytest.fixture(params=["psycopg", "asyncpg"])
def claiming(request: pytest.FixtureRequest, database_url: str) -> Claiming:
    """Claims `GRANT` once on a pool of its own, of each kind, which is closed afterwards."""
    url = driver(database_url, request.param)

    async def claim_once(check: Check) -> Claim:
        if request.param == "psycopg":
            pool = ClaimPool(create_engine(url), check=check)
            try:
                return pool.claim(GRANT, wait=1.0)
            finally:
                pool.close()
        async_pool = AsyncClaimPool(create_async_engine(url), check=check)
        try:
            return await async_pool.claim(GRANT, wait=1.0)
        finally:
            await async_pool.close()

    return claim_once


async def test_a_grant_is_claimed_and_a_newer_claim_refuses_it(claiming: Claiming, pg: Callable[[], Any]) -> None:
    assert await claiming(no_check) == Claim("account:42", 7, "a")
    pg().execute("select fenceguard.claim('account:42', 8, 'b')")
    with pytest.raises(StaleToken):
        await claiming(no_check)


async def test_an_error_that_is_none_of_ours_keeps_the_drivers_as_its_cause(
    claiming: Claiming,
) -> None:
    with pytest.raises(DBAPIError) as caught:
        await claiming(divide)
    assert caught.value.__cause__ is caught.value.orig


async def test_a_server_that_does_not_serve_is_unreachable_with_the_drivers_error_as_the_cause(
    database_url: str,
) -> None:
    pool = ClaimPool(create_engine(driver(database_url + "_nosuch", "psycopg")), check=no_check)
    with pytest.raises(StoreUnreachable, match="_nosuch") as caught:
        pool.claim(GRANT, wait=0.0)
    assert isinstance(caught.value.__cause__, psycopg.OperationalError)


def test_the_check_is_made_until_it_succeeds_and_then_no_more(database_url: str) -> None:
    checks: list[str] = []

    def check(connection: Connection) -> None:
        checks.append("failed" if not checks else "succeeded")
        if len(checks) == 1:
            divide(connection)

    pool = ClaimPool(create_engine(driver(database_url, "psycopg")), check=check)
    with suppress(DBAPIError):
        pool.claim(GRANT, wait=0.0)
    for _ in range(2):
        pool.claim(GRANT, wait=0.0)
    pool.close()
    assert checks == ["failed", "succeeded"]
