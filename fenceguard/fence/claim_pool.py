"""Where a guard claims: on connections of its own, never in a caller's transaction.

A claim waits for open transactions of earlier holders. On a caller's connection it would wait for that very
transaction; from a pool shared with the callers it would wait for a connection that only its own work can
give back.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from fenceguard.fence.calls import claim
from fenceguard.fence.refusals import raise_named
from fenceguard.model import Claim, Grant

ANSWER_WITHIN: Final = 5.0
"""Seconds for connecting and answering, beside the wait: a server that is frozen or cut off says nothing."""

Check: TypeAlias = Callable[[Connection], None]
"""Raises when the database cannot serve the library; made once by each pool, before its first claim."""


def _own_pool(engine: Engine) -> Engine:
    """Return an engine in autocommit that connects as `engine` does, with a pool of its own."""
    own = Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=engine.hide_parameters)
    return own.execution_options(isolation_level="AUTOCOMMIT")


@contextmanager
def _bounded(connection: Connection, seconds: float) -> Generator[None]:
    """Cut the connection when `seconds` have gone by: a frozen server's own time-outs do not reach us."""
    driver: Any = connection.connection.driver_connection
    if not hasattr(driver, "fileno"):
        yield
        return
    cut = threading.Timer(seconds, _shut_down, (driver.fileno(),))
    cut.daemon = True
    cut.start()
    try:
        yield
    finally:
        cut.cancel()


def _shut_down(descriptor: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


class _CheckedClaims:
    """Claims, after a check that has to succeed once."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._succeeded = False

    def claim(self, connection: Connection, grant: Grant, wait: float) -> Claim:
        if not self._succeeded:
            self._check(connection)
            self._succeeded = True
        return claim(connection, grant.resource, grant.token, grant.owner, wait=wait)


class ClaimPool:
    """Claims fences on sync connections."""

    def __init__(self, engine: Engine, *, check: Check, answer_within: float = ANSWER_WITHIN) -> None:
        """Open no connection yet; connecting is bounded by the driver's own ``connect_timeout``.

        Raises:
            TypeError: `engine` is none of `create_engine`.
        """
        if not isinstance(engine, Engine):  # pyright: ignore[reportUnnecessaryIsInstance] users may err
            raise TypeError(
                f"Guard takes an engine of create_engine(), not {type(engine).__name__}; see AsyncGuard"
            )
        self._engine = _own_pool(engine)
        self._claims = _CheckedClaims(check)
        self._answer_within = answer_within

    def claim(self, grant: Grant, *, wait: float) -> Claim:
        """Claim the grant's fence, waiting up to `wait` seconds.

        Raises as `fenceguard.fence.claim`, and what the check raises.
        """
        try:
            with self._engine.connect() as connection, _bounded(connection, wait + self._answer_within):
                return self._claims.claim(connection, grant, wait)
        except (SQLAlchemyError, OSError) as error:
            raise_named(error)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()


class AsyncClaimPool:
    """Claims fences on async connections; as `ClaimPool`."""

    def __init__(self, engine: AsyncEngine, *, check: Check, answer_within: float = ANSWER_WITHIN) -> None:
        """Open no connection yet.

        Raises:
            TypeError: `engine` is none of `create_async_engine`.
        """
        if not isinstance(engine, AsyncEngine):  # pyright: ignore[reportUnnecessaryIsInstance] users may err
            raise TypeError(
                f"AsyncGuard takes an engine of create_async_engine(), not {type(engine).__name__}; see Guard"
            )
        self._engine = AsyncEngine(_own_pool(engine.sync_engine))
        self._claims = _CheckedClaims(check)
        self._answer_within = answer_within

    async def claim(self, grant: Grant, *, wait: float) -> Claim:
        """Claim the grant's fence; as `ClaimPool.claim`."""
        try:
            async with asyncio.timeout(wait + self._answer_within), self._engine.connect() as connection:
                return await connection.run_sync(self._claims.claim, grant, wait)
        except (SQLAlchemyError, OSError) as error:
            raise_named(error)

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.dispose()
