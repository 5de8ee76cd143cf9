"""Announcing through psycopg 3: ``BEGIN`` and the setting travel as one simple query."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import psycopg
from psycopg import IsolationLevel, generators
from psycopg.pq import ExecStatus, TransactionStatus
from sqlalchemy.engine.interfaces import AdaptedConnection
from sqlalchemy.pool import PoolProxiedConnection

from fenceguard.fence.announce import HAS_ENTERED, by_cursor, dbapi

if TYPE_CHECKING:
    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGresult

Driver: TypeAlias = "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]"


class PsycopgLink:
    """See `fenceguard.fence.announce.Link`; serves psycopg's sync connections and its async ones."""

    def in_transaction(self, proxied: PoolProxiedConnection) -> bool | None:
        """Ask libpq, which remembers what the server said last."""
        return _driver(proxied).pgconn.transaction_status != TransactionStatus.IDLE

    def send(self, proxied: PoolProxiedConnection, statement: str, done: Callable[[], None]) -> None:
        """Begin and announce at once; in a transaction, announce by a cursor."""
        connection = dbapi(proxied)
        if self.in_transaction(proxied) or not _begin(proxied, statement):
            by_cursor(connection, statement)
        done()

    def forget(self, proxied: PoolProxiedConnection) -> None:
        """Nothing is kept."""

    def has_entered(self, proxied: PoolProxiedConnection) -> bool | None:
        """Ask where the driver's lock is free and libpq reports an open transaction."""
        driver = cast("Driver | None", proxied.driver_connection)
        if driver is None:
            return None
        if isinstance(driver, psycopg.Connection):
            return _ask(proxied, driver)
        adapted: AdaptedConnection = proxied.dbapi_connection  # type: ignore[assignment] # of the async dialect
        return adapted.run_async(_ask_async)

    def prepare_connect(self, arguments: dict[str, Any]) -> None:
        """Nothing is needed."""


def _driver(proxied: PoolProxiedConnection) -> Driver:
    driver: Driver = proxied.driver_connection  # type: ignore[assignment] # of psycopg's dialects
    return driver


def _begin(proxied: PoolProxiedConnection, statement: str) -> bool:
    """Begin and announce; `False` when the server refused, and the transaction is not begun."""
    driver = _driver(proxied)
    query = f"{_begin_command(driver)}; {statement}".encode()
    if isinstance(driver, psycopg.Connection):
        with driver.lock:
            driver.pgconn.send_query(query)
            accepted = _accepted(driver.wait(generators.execute(driver.pgconn)))
        if not accepted:
            driver.rollback()
        return accepted
    adapted: AdaptedConnection = proxied.dbapi_connection  # type: ignore[assignment] # of the async dialect
    return adapted.run_async(_begin_async(query))


def _begin_async(query: bytes) -> Callable[[psycopg.AsyncConnection[Any]], Awaitable[bool]]:
    async def begin(driver: psycopg.AsyncConnection[Any]) -> bool:
        async with driver.lock:
            driver.pgconn.send_query(query)
            accepted = _accepted(await driver.wait(generators.execute(driver.pgconn)))
        if not accepted:
            await driver.rollback()
        return accepted

    return begin


def _ask(proxied: PoolProxiedConnection, driver: psycopg.Connection[Any]) -> bool | None:
    if not driver.lock.acquire(blocking=False):
        return None
    try:
        # Looked at under the lock: another thread may have given it back to the pool.
        return None if proxied.dbapi_connection is None else driver.wait(_asking(driver))
    except psycopg.Error:
        return None
    finally:
        driver.lock.release()


async def _ask_async(driver: psycopg.AsyncConnection[Any]) -> bool | None:
    if driver.lock.locked():
        return None
    async with driver.lock:
        with suppress(psycopg.Error):
            return await driver.wait(_asking(driver))
    return None


def _asking(driver: Driver) -> PQGen[bool | None]:
    """Ask, under the driver's lock."""
    if driver.pgconn.transaction_status != TransactionStatus.INTRANS:
        return False if driver.pgconn.transaction_status == TransactionStatus.IDLE else None
    driver.pgconn.send_query(HAS_ENTERED.encode())
    (answer,) = yield from generators.execute(driver.pgconn)
    return answer.ntuples == 1 if answer.status == ExecStatus.TUPLES_OK else None


def _accepted(results: list[PGresult]) -> bool:
    return all(result.status == ExecStatus.COMMAND_OK for result in results)


def _begin_command(driver: Driver) -> str:
    """Return the BEGIN that the driver would send, from what its attributes say."""
    words = ["begin"]
    if driver.isolation_level is not None:
        words.append(f"isolation level {IsolationLevel(driver.isolation_level).name.replace('_', ' ')}")
    if driver.read_only is not None:
        words.append("read only" if driver.read_only else "read write")
    if driver.deferrable is not None:
        words.append("deferrable" if driver.deferrable else "not deferrable")
    return " ".join(words)
