"""The listeners on an engine: what happens at BEGIN, before each statement, at an error and at COMMIT.

They sit on the engine, so that every session, Core and `session.connection()` are covered alike. One set of
them serves all guards of an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from copy import copy
from typing import Any, Final, Protocol

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import Dialect, ExceptionContext, ExecutionContext
from sqlalchemy.pool import PoolProxiedConnection

from fenceguard.errors import FenceguardError, StaleToken
from fenceguard.fence.announce import (
    Announcement,
    CursorLink,
    Link,
    Stamps,
    announcement,
    begin_anew,
    dbapi,
    is_autocommit,
    is_unfenced,
    merge,
    setting,
)
from fenceguard.fence.refusals import missing_name, refused
from fenceguard.model import Claim, Grant

OWN: Final = "fenceguard_own"
"""Execution option of statements that announce nothing and whose errors their caller reads."""

_KEPT_AS: Final = "_fenceguard_hooks"

_logger = logging.getLogger("fenceguard")


class GrantSource(Protocol):
    """Where the grants come from that an engine's transactions announce; a guard is one."""

    def at_begin(self) -> Sequence[Claim | Grant]:
        """Look at trust: called when a transaction begins, before anything is sent.

        Raises:
            LeaseLost: a grant may not be trusted any more; the transaction does not begin.
        """
        ...

    def now(self) -> Sequence[Claim | Grant]:
        """Return the grants of the context, trusted or not; called before each statement, must not raise."""
        ...

    def announced(self, transaction: Announcement) -> None:
        """Note that `transaction` announces grants; called before each statement so sent, must not raise."""
        ...

    def refused(self, error: StaleToken) -> None:
        """Note that Postgres refused a write, under a grant of this source or of another; must not raise."""
        ...

    def committing(self) -> AbstractContextManager[None]:
        """Make the context in which an async engine's COMMIT is sent and answered, on the task that commits."""
        ...


class Hooks:
    """The listeners of one engine.

    Attributes:
        sources: whose grants its transactions announce.
    """

    def __init__(self, dialect: Dialect) -> None:
        """Choose how drivers of `dialect` are told; raises `ValueError` when it is none of Postgres."""
        if dialect.name != "postgresql":
            raise ValueError(f"fenceguard guards Postgres, and this engine speaks {dialect.name}")
        self.sources: list[GrantSource] = []
        self._link = _link_of(dialect)
        self._watch_commits(dialect)

    def add(self, source: GrantSource) -> None:
        """Announce the grants of `source`; repeated, it does nothing."""
        if not any(known is source for known in self.sources):
            self.sources.append(source)

    def state_of(self, connection: Connection) -> Announcement:
        """Return what the connection's transaction announces; nothing yet, when it began unheard."""
        return announcement(connection) or begin_anew(connection, self._link)

    def listen(self, engine: Engine) -> None:
        """Listen on `engine`; repeated, it does nothing."""
        if event.contains(engine, "begin", self._begin):
            return
        event.listen(engine, "do_connect", self._prepare_connect)
        event.listen(engine, "begin", self._begin)
        event.listen(engine, "begin_twophase", self._begin_twophase)
        event.listen(engine, "before_cursor_execute", self._before_statement)
        event.listen(engine, "handle_error", self._translate)
        event.listen(engine, "prepare_twophase", self._prepare_twophase)
        event.listen(engine, "commit", self._commit)
        event.listen(engine, "commit_twophase", self._commit_twophase)
        event.listen(engine, "rollback", self._rollback)
        event.listen(engine, "rollback_twophase", self._rollback_twophase)

    def _prepare_connect(self, dialect: Dialect, record: Any, cargs: Any, cparams: dict[str, Any]) -> None:  # noqa: ARG002 the event's
        self._link.prepare_connect(cparams)

    def _watch_commits(self, dialect: Dialect) -> None:
        """Let the sources know while a COMMIT is under way: no event tells when it has been answered."""
        commit = dialect.do_commit

        def do_commit(connection: PoolProxiedConnection) -> None:
            with ExitStack() as commits:
                for source in self.sources:
                    commits.enter_context(source.committing())
                commit(connection)

        vars(dialect)["do_commit"] = do_commit

    # -- a transaction begins

    def _begin(self, connection: Connection) -> None:
        for source in self.sources:
            source.at_begin()
        begin_anew(connection, self._link)
        self._link.forget(connection.connection)

    def _begin_twophase(self, connection: Connection, xid: Any) -> None:  # noqa: ARG002 the event's
        self._begin(connection)

    # -- a statement

    def _before_statement(  # noqa: PLR0913, PLR0917 the event's
        self,
        connection: Connection,
        cursor: Any,  # noqa: ARG002
        statement: str,
        parameters: Any,  # noqa: ARG002
        context: ExecutionContext | None,
        executemany: bool,  # noqa: ARG002, FBT001
    ) -> None:
        if not connection.in_transaction():
            # SQLAlchemy skips its autobegin on a connection whose last BEGIN was refused by a listener.
            connection.begin()
        state = self.state_of(connection)
        if state.over or _is_own(context):
            return
        if statement.lstrip()[:8].lower() == "rollback":
            # It also leaves an aborted transaction, which nothing else does, and reverts what was announced since.
            state.sent = None
            return
        if state.doomed is not None:
            raise_again(state.doomed)
        wanted = self._wanted(connection, state)
        if wanted:
            for source in self.sources:
                source.announced(state)
        self._announce(connection, state, wanted)

    def _announce(self, connection: Connection, state: Announcement, wanted: Stamps) -> None:
        if wanted and is_autocommit(connection):
            raise ValueError(
                f"a connection in AUTOCOMMIT cannot announce a hold, and this one is used under {sorted(wanted)}: "
                "use a transaction, or unfenced(connection, reason=...)"
            )
        if self._link.in_transaction(connection.connection) is False:
            self._link.forget(connection.connection)
            state.sent = {}
        if state.sent == wanted:
            return
        statement = setting(wanted)
        if state.sent is None and not is_unfenced(connection):
            # A rollback to a savepoint may have brought back a block of `unfenced` that has ended since.
            statement += "; set local fenceguard.unfenced = ''"
        state.sent = None

        def done() -> None:
            state.sent = wanted

        self._link.send(connection.connection, statement, done)

    def _wanted(self, connection: Connection, state: Announcement) -> Stamps:
        if is_unfenced(connection):
            return {}
        wanted: Stamps = {}
        for source in self.sources:
            merge(source.now(), wanted)
        merge(state.entered, wanted)
        for grants in state.given.values():
            merge(grants, wanted)
        return wanted

    # -- an error

    def _translate(self, context: ExceptionContext) -> FenceguardError | None:
        connection, execution = context.connection, context.execution_context
        state = None if connection is None else announcement(connection)
        if connection is None or state is None or _is_own(execution):
            return None
        if isinstance(context.original_exception, FenceguardError):
            return None  # raised here, before the statement
        error = refused(context.original_exception)
        if isinstance(error, StaleToken):
            if not is_autocommit(connection):
                state.doomed = state.doomed or error
            for source in self.sources:
                source.refused(error)
        return error or missing_name(context.original_exception, context.statement, execution)

    # -- a transaction ends

    def _commit(self, connection: Connection) -> None:
        doomed = self._end(connection)
        if doomed is not None:
            # For real and now: SQLAlchemy takes this for a failed COMMIT, and may leave the rollback to the caller.
            # If it fails, the connection is gone and its transaction with it; the refusal is what matters.
            with suppress(Exception):
                dbapi(connection.connection).rollback()
            raise_again(doomed)

    def _commit_twophase(self, connection: Connection, xid: Any, is_prepared: bool) -> None:  # noqa: ARG002, FBT001 the event's
        self._prepare_twophase(connection, xid)

    def _prepare_twophase(self, connection: Connection, xid: Any) -> None:  # noqa: ARG002 the event's
        doomed = self._end(connection)
        if doomed is not None:
            raise_again(doomed)

    def _rollback(self, connection: Connection) -> None:
        self._end(connection)

    def _rollback_twophase(self, connection: Connection, xid: Any, is_prepared: bool) -> None:  # noqa: ARG002, FBT001 the event's
        self._end(connection)

    def _end(self, connection: Connection) -> StaleToken | None:
        state = announcement(connection)
        if state is None or state.over:
            return None
        state.over = True
        for call in tuple(state.on_end):
            try:
                call()
            except Exception:
                # Nothing of ours may break a COMMIT or ROLLBACK.
                _logger.exception("what was to be called at the end of a transaction failed")
        if not (connection.closed or connection.invalidated):
            self._link.forget(connection.connection)
        return state.doomed


def install(engine: Engine) -> Hooks:
    """Listen on an engine and return the listeners, which it shares with its variants of other options."""
    # Kept in the dialect, which the variants share. Not in a weak dictionary: a guard that is a source knows the
    # engine, so that the dictionary's value would keep its key alive for ever.
    kept: dict[str, Any] = vars(engine.dialect)
    hooks: Hooks = kept.get(_KEPT_AS) or kept.setdefault(_KEPT_AS, Hooks(engine.dialect))
    hooks.listen(engine)
    return hooks


def _is_own(execution: ExecutionContext | None) -> bool:
    return execution is not None and OWN in execution.execution_options


def raise_again(doomed: StaleToken) -> None:
    """Raise the refusal that doomed a transaction, as a new error with the server's answer as its cause."""
    raise copy(doomed) from doomed.__cause__


def _link_of(dialect: Dialect) -> Link:
    # Imported where they are in use: asyncpg users need no psycopg.
    if dialect.driver == "asyncpg":
        from fenceguard.fence.announce_asyncpg import AsyncpgLink  # noqa: PLC0415

        return AsyncpgLink()
    if dialect.driver == "psycopg":
        from fenceguard.fence.announce_psycopg import PsycopgLink  # noqa: PLC0415

        return PsycopgLink()
    return CursorLink()
