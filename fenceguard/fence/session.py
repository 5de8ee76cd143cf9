"""SQLAlchemy sessions and engines that announce the grants they act under.

`attach` puts listeners on an engine: from then on the announcement of every transaction equals, before every
statement, the grants of the context, what `enter` announced by hand, and what its session was given::

    attach(engine, source)
    with sessions(engine)(grant=held.grant) as session: ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Engine, event
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, SessionTransaction, sessionmaker
from sqlalchemy.util import await_, greenlet_spawn

from fenceguard.fence.announce import Announcement
from fenceguard.fence.hooks import GrantSource, install
from fenceguard.model import Claim, Grant

__all__ = [
    "FencedSession",
    "GrantSource",
    "async_sessions",
    "attach",
    "attach_sessionmaker",
    "await_in_session",
    "has_entered",
    "has_entered_async",
    "sessions",
]

T = TypeVar("T")


def attach(engine: Engine | AsyncEngine, source: GrantSource) -> None:
    """Make every transaction of an engine announce the grants of `source`; once, however often it is called.

    Several sources may be attached to one engine. With asyncpg, connections made before announce by a statement of
    their own, those made afterwards with BEGIN.

    Raises:
        ValueError: the engine is none of Postgres.
    """
    hooks = install(engine.sync_engine if isinstance(engine, AsyncEngine) else engine)
    hooks.add(source)


class FencedSession(Session):
    """A session that can be given grants; also the base of what `sessions` makes of other session classes."""

    def __init__(
        self,
        bind: Engine | Connection | None = None,
        *,
        grant: Claim | Grant | Sequence[Claim | Grant] | None = None,
        **options: Any,
    ) -> None:
        """Open a session as SQLAlchemy's `Session`; its transactions also announce `grant`, claimed before."""
        super().__init__(bind, **options)
        if grant is not None:
            _Given(self, (grant,) if isinstance(grant, Claim | Grant) else tuple(grant))


class _Given:
    """Announces a session's grants in its transactions, also in one that it joins, until it leaves that."""

    def __init__(self, session: Session, grants: tuple[Claim | Grant, ...]) -> None:
        self._grants = grants
        self._joined: list[Announcement] = []
        event.listen(session, "after_begin", self._after_begin)
        event.listen(session, "after_transaction_end", self._after_end)

    def _after_begin(self, session: Session, transaction: SessionTransaction, connection: Connection) -> None:  # noqa: ARG002 the event's
        state = install(connection.engine).state_of(connection)
        state.given[id(session)] = self._grants
        self._joined.append(state)

    def _after_end(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:
            for state in self._joined:
                state.given.pop(id(session), None)
            self._joined.clear()


def sessions(
    engine: Engine | None = None, *, class_: type[Session] = Session, **options: Any
) -> sessionmaker[Session]:
    """Return a sessionmaker whose sessions take ``grant=``.

    Args:
        engine: what its sessions are bound to; see `attach`.
        class_: of its sessions.
        options: those of SQLAlchemy's `sessionmaker`.
    """
    return sessionmaker(engine, class_=_fenced(class_), **options)


def async_sessions(
    engine: AsyncEngine | None = None, *, sync_session_class: type[Session] = Session, **options: Any
) -> async_sessionmaker[AsyncSession]:
    """Return an async sessionmaker whose sessions take ``grant=``; arguments as `sessions`."""
    return async_sessionmaker(engine, sync_session_class=_fenced(sync_session_class), **options)


def attach_sessionmaker(factory: sessionmaker[Any] | async_sessionmaker[Any], source: GrantSource) -> None:
    """Attach the engines of a sessionmaker that exists already, and let its sessions take ``grant=``.

    Raises:
        ValueError: it is bound to no engine yet.
    """
    binds: list[Any] = [factory.kw.get("bind"), *(factory.kw.get("binds") or {}).values()]
    engines = [bind for bind in binds if isinstance(bind, Engine | AsyncEngine)]
    if not engines:
        raise ValueError("the sessionmaker is bound to no engine; bind it first: factory.configure(bind=engine)")
    for engine in engines:
        attach(engine, source)
    if isinstance(factory, sessionmaker):
        factory.class_ = _fenced(factory.class_)
    else:
        inner: type[Session] = factory.kw.get("sync_session_class", factory.class_.sync_session_class)
        factory.kw["sync_session_class"] = _fenced(inner)


def _fenced(class_: type[Session]) -> type[Session]:
    if issubclass(class_, FencedSession):
        return class_
    if class_ is Session:
        return FencedSession
    return cast("type[Session]", type(class_.__name__, (FencedSession, class_), {}))


def await_in_session(awaitable: Awaitable[T]) -> T:
    """Wait for `awaitable` in sync code that an `AsyncSession` runs, such as a source's `at_begin`."""
    return await_(awaitable)


def has_entered(transaction: Announcement) -> bool:
    """Ask an open transaction, on its own connection, whether it has entered: compared a token with a fence.

    It never waits for another statement. One that cannot be asked (it is aborted, runs a statement for another
    thread or task, was cut, or belongs to another event loop) counts as entered; one that is over does not.

    Args:
        transaction: as a source was told of it; of an async engine it is asked by `has_entered_async`.
    """
    proxied = transaction.proxied()
    if transaction.over or proxied is None:  # collected, and so rolled back by its pool
        return False
    if transaction.home is not None and transaction.home is not _running_loop():
        return True
    return transaction.link.has_entered(proxied) is not False and not transaction.over


async def has_entered_async(transaction: Announcement) -> bool:
    """Ask as `has_entered`, from async code."""
    # A query that is cancelled would abort the transaction.
    return await asyncio.shield(greenlet_spawn(has_entered, transaction))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
