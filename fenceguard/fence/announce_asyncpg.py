"""Announcing through asyncpg: in one message with the driver's own BEGIN, where the connection is ours.

SQLAlchemy makes connections of the class below once its engine is attached. On others (made earlier, or by a
creator of the user's) a cursor announces, at the price of a round trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, Final, cast

import asyncpg  # type: ignore[import-untyped] # pyright: ignore[reportMissingTypeStubs] ships no types
from sqlalchemy.engine.interfaces import AdaptedConnection
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import await_

from fenceguard.fence.announce import HAS_ENTERED, by_cursor, dbapi

_FAILURES: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError)


class Announcing:
    """Mixin of an `asyncpg.Connection`: announces with BEGIN.

    Attributes:
        pending: a statement for the next BEGIN to carry, and what to call when it has.
    """

    pending: tuple[str, Callable[[], None]] | None = None

    @cached_property
    def _turn(self) -> asyncio.Lock:
        """A COMMIT waits while `ask` does, instead of failing because the connection is busy."""
        return asyncio.Lock()

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str:  # noqa: ASYNC109 asyncpg's
        """Execute as `asyncpg.Connection.execute`, by which the driver also sends its own BEGIN and COMMIT."""
        send: Any = super()
        done: Callable[[], None] | None = None
        if self.pending is not None and query.startswith("BEGIN"):
            (statement, done), self.pending = self.pending, None
            query = f"{query} {statement};"
        async with self._turn:
            status = await send.execute(query, *args, timeout=timeout)
        if done is not None:
            done()
        return cast("str", status)

    async def ask(self, statements: asyncio.Lock) -> bool | None:
        """Execute `HAS_ENTERED`; `None` when it cannot be asked at once.

        Args:
            statements: held by SQLAlchemy's adapter during each of its statements.
        """
        driver: Any = self
        if statements.locked() or self._turn.locked():
            return None
        if not driver.is_in_transaction():
            return False
        async with statements:
            # As a simple query, which no cache remembers; its status counts the rows.
            with suppress(*_FAILURES):
                return bool(await driver.execute(HAS_ENTERED) == "SELECT 1")
        return None


def _ours(proxied: PoolProxiedConnection) -> Announcing | None:
    driver = proxied.driver_connection
    return driver if isinstance(driver, Announcing) else None


class AsyncpgLink:
    """See `fenceguard.fence.announce.Link`."""

    def in_transaction(self, proxied: PoolProxiedConnection) -> bool | None:
        """Ask the driver, which remembers what the server said last."""
        driver: Any = proxied.driver_connection
        return bool(driver.is_in_transaction())

    def send(self, proxied: PoolProxiedConnection, statement: str, done: Callable[[], None]) -> None:
        """Leave the statement to the next BEGIN, or send it as a simple query, which no cache remembers.

        Raises:
            ValueError: the transaction was ended by a COMMIT or ROLLBACK in SQL, behind SQLAlchemy's back.
        """
        ours, connection = _ours(proxied), dbapi(proxied)
        if self.in_transaction(proxied):
            try:
                cast("AdaptedConnection", connection).run_async(lambda driver: driver.execute(statement))
            except _FAILURES:
                # Through the adapter the same failure comes as SQLAlchemy knows it.
                by_cursor(connection, statement)
        elif getattr(connection, "_transaction", None) is not None:
            # The adapter (which keeps this to itself) will send no BEGIN: each statement would commit by itself,
            # and announce nothing.
            raise ValueError(
                "this transaction was ended in SQL and cannot announce a hold any more: end it by commit() or "
                "rollback() of the session or connection"
            )
        elif ours is not None:
            ours.pending = (statement, done)
            return
        else:
            by_cursor(connection, statement)
        done()

    def forget(self, proxied: PoolProxiedConnection) -> None:
        """Drop what no BEGIN has carried."""
        ours = _ours(proxied)
        if ours is not None:
            ours.pending = None

    def has_entered(self, proxied: PoolProxiedConnection) -> bool | None:
        """Ask on a connection of `Announcing`; another one's COMMIT would not wait for the answer."""
        ours, connection = _ours(proxied), proxied.dbapi_connection
        if ours is None:
            return None
        statements = cast("Any", connection)._execute_mutex  # noqa: SLF001 nothing public tells when it is busy
        return await_(ours.ask(statements))

    def prepare_connect(self, arguments: dict[str, Any]) -> None:
        """Have the driver make connections of `Announcing`, on top of the user's class if there is one."""
        given = arguments.get("connection_class", asyncpg.Connection)
        if "async_creator_fn" in arguments or issubclass(given, Announcing):
            return
        arguments["connection_class"] = type("AnnouncingConnection", (Announcing, given), {})
