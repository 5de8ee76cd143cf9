"""`unfenced`: the one named way round the fence, for maintenance; each use is logged with its reason."""

from __future__ import annotations

import logging
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeAlias, cast

from sqlalchemy import Connection, Text, func, literal, select, true
from sqlalchemy.engine import RootTransaction
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from fenceguard.fence.announce import announcement, count_unfenced, is_autocommit
from fenceguard.fence.hooks import OWN
from fenceguard.fence.refusals import raise_named

Target: TypeAlias = Session | Connection
AsyncTarget: TypeAlias = AsyncSession | AsyncConnection

_logger = logging.getLogger("fenceguard")


def unfenced(target: Target | AsyncTarget, *, reason: str) -> Unfenced:
    """Let a block write to fenced tables without a grant.

    ::

        with unfenced(session, reason="back-fill 2027-01"):
            session.execute(…)

    In the block nothing is announced, so that rows keep their stamp, and tables at ``enforce`` admit the writes of
    the transaction that is open or begins there; one begun later in the block is not covered. On a connection in
    AUTOCOMMIT the block only lifts the refusal to use it under a hold: a table at ``enforce`` still refuses.

    Args:
        target: a session or connection; ``async with`` for the async ones.
        reason: is written to the logs of the server and of this process.

    Raises:
        ValueError: `reason` is blank.
        SchemaMissing: on entering the block; the database lacks fenceguard's schema.
    """
    if not reason.strip():
        raise ValueError("unfenced needs a reason, which is logged: say who writes without a fence, and why")
    return Unfenced(target, reason)


class Unfenced:
    """The block of `unfenced`; to be entered once."""

    def __init__(self, target: Target | AsyncTarget, reason: str) -> None:
        """See `unfenced`."""
        self._target = target
        self._reason = reason
        self._connection: Connection | None = None
        self._transaction: RootTransaction | None = None
        self._before = ""

    def __enter__(self) -> None:
        """Begin the block."""
        if not isinstance(self._target, Session | Connection):
            raise TypeError(f"write `async with` for unfenced writes of {type(self._target).__name__}")
        self._begin(self._target)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; the rest of the transaction is fenced again."""
        self._end()

    async def __aenter__(self) -> None:
        """Begin the block."""
        if not isinstance(self._target, AsyncSession | AsyncConnection):
            raise TypeError(f"write `with` for unfenced writes of {type(self._target).__name__}")
        await self._target.run_sync(self._begin)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; the rest of the transaction is fenced again."""
        target = cast("AsyncTarget", self._target)
        await target.run_sync(lambda _: self._end())

    def _begin(self, target: Target) -> None:
        connection = target if isinstance(target, Connection) else target.connection()
        _logger.warning("unfenced writes: %s", self._reason, extra={"fenceguard": {"reason": self._reason}})
        if not is_autocommit(connection):
            # Also begins the transaction where there is none.
            try:
                self._before = _call(
                    connection, func.coalesce(func.current_setting("fenceguard.grants", true()), "")
                )
                _call(connection, func.fenceguard.unfenced(literal(self._reason, Text)))
            except DBAPIError as error:
                raise_named(error, connection)
            self._announce(connection, "")
            self._transaction = connection.get_transaction()
        count_unfenced(connection, 1)
        self._connection = connection

    def _end(self) -> None:
        connection = cast("Connection", self._connection)
        if count_unfenced(connection, -1) or self._transaction is None:
            return
        if connection.closed or connection.invalidated:
            return
        if connection.get_transaction() is self._transaction and self._transaction.is_active:
            # In an aborted transaction nothing more is written, and its settings go with it.
            with suppress(DBAPIError):
                _call(connection, func.set_config("fenceguard.unfenced", "", true()))
                self._announce(connection, self._before)

    def _announce(self, connection: Connection, text: str) -> None:
        """Set what is announced; hooks, where there are any, say it anew after the block."""
        _call(connection, func.set_config("fenceguard.grants", text, true()))
        state = announcement(connection)
        if state is not None:
            state.sent = None if text else {}


def _call(connection: Connection, function: Any) -> str:
    return cast("str", connection.scalar(select(function), execution_options={OWN: True}))
