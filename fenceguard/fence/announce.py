"""What a transaction announces, and how it is said to the server.

The announcement is JSON in the transaction-local setting ``fenceguard.grants``; the triggers of fenced tables
compare it with the fence at the first write. Announcing locks nothing, and takes no snapshot.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary, ref

from sqlalchemy import Connection
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import PoolProxiedConnection

from fenceguard.errors import StaleToken
from fenceguard.model import Claim, Grant

Stamps: TypeAlias = dict[str, tuple[int, str]]
"""Token and owner by resource."""


def merge(grants: Iterable[Claim | Grant], into: Stamps) -> Stamps:
    """Add grants to `into`. Of two tokens for one resource the smaller counts: if either is stale, all is."""
    for grant in grants:
        known = into.get(grant.resource)
        if known is None or grant.token < known[0]:
            into[grant.resource] = (grant.token, grant.owner)
    return into


def setting(stamps: Stamps) -> str:
    """Return the statement that announces `stamps`; it means the same under every setting of the server.

    Pure ASCII, without a percent sign, in an escape string: no encoding, driver or
    ``standard_conforming_strings`` reads it differently.
    """
    announced = {resource: {"token": token, "owner": owner} for resource, (token, owner) in stamps.items()}
    text = json.dumps(announced, separators=(",", ":")).replace("%", "\\u0025") if announced else ""
    literal = text.replace("\\", "\\\\").replace("'", "''")
    return f"set local fenceguard.grants = E'{literal}'"


@dataclass(slots=True, eq=False)
class Announcement:
    """What one transaction announces.

    Attributes:
        link: how its driver is told, and asked.
        proxied: returns its DBAPI connection, which it does not keep alive; `None` when that was collected.
        home: the event loop of its connection, for async drivers.
        sent: what the server has been told; `None` when that is not known.
        entered: what `enter` announced by hand, to stay until the end.
        given: the grants of sessions that take part, by the session's id.
        doomed: the refusal after which nothing of the transaction may be committed.
        over: whether it has been committed, rolled back or prepared.
        on_end: what to call as it ends, from the thread that ends it.
    """

    link: Link
    proxied: Callable[[], PoolProxiedConnection | None]
    home: asyncio.AbstractEventLoop | None
    sent: Stamps | None = field(default_factory=dict[str, tuple[int, str]])
    entered: list[Claim | Grant] = field(default_factory=list["Claim | Grant"])
    given: dict[int, tuple[Claim | Grant, ...]] = field(default_factory=dict[int, tuple["Claim | Grant", ...]])
    doomed: StaleToken | None = None
    over: bool = False
    on_end: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])


# By SQLAlchemy's connection, not by the driver's: it outlives a cut, and is not pooled.
_announcements: WeakKeyDictionary[Connection, Announcement] = WeakKeyDictionary()
_unfenced_blocks: WeakKeyDictionary[Connection, int] = WeakKeyDictionary()


def announcement(connection: Connection) -> Announcement | None:
    """Return what the connection's last transaction announces; `None` when its engine is not attached."""
    return _announcements.get(connection)


def begin_anew(connection: Connection, link: Link) -> Announcement:
    """Begin with nothing announced."""
    home = asyncio.get_running_loop() if connection.dialect.is_async else None
    state = _announcements[connection] = Announcement(link, ref(connection.connection), home)
    return state


HAS_ENTERED: Final = (
    "select true where pg_catalog.starts_with("
    "coalesce(pg_catalog.current_setting('fenceguard.entered', true), ''), "
    "coalesce(pg_catalog.pg_current_xact_id_if_assigned()::pg_catalog.text, '-') operator(pg_catalog.||) ' ')"
)
"""Returns a row when the transaction has entered, and none when it has not."""

Committing: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a COMMIT is sent and answered."""


def is_autocommit(connection: Connection) -> bool:
    """Tell whether each statement commits by itself."""
    return connection.dialect.detect_autocommit_setting(dbapi(connection.connection))


def is_unfenced(connection: Connection) -> bool:
    """Tell whether a block of `unfenced` is open."""
    return connection in _unfenced_blocks


def count_unfenced(connection: Connection, change: int) -> int:
    """Open (1) or close (-1) a block of `unfenced`; returns how many are open."""
    blocks = _unfenced_blocks.pop(connection, 0) + change
    if blocks:
        _unfenced_blocks[connection] = blocks
    return blocks


class Link(Protocol):
    """How one kind of driver is told; the DBAPI connection is SQLAlchemy's, not the driver's own."""

    def in_transaction(self, proxied: PoolProxiedConnection) -> bool | None:
        """Tell whether the server is in a transaction; `None` when the driver does not say."""
        ...

    def send(self, proxied: PoolProxiedConnection, statement: str, done: Callable[[], None]) -> None:
        """Execute `statement`, with the BEGIN if there is none yet; call `done` when the server has."""
        ...

    def forget(self, proxied: PoolProxiedConnection) -> None:
        """Drop what has not been sent."""
        ...

    def has_entered(self, proxied: PoolProxiedConnection) -> bool | None:
        """Ask the server, by `HAS_ENTERED`; `None` when it cannot be asked at once."""
        ...

    def prepare_connect(self, arguments: dict[str, Any]) -> None:
        """Add to a new connection's arguments what this link needs."""
        ...


class CursorLink:
    """Any driver: a cursor executes the statement, at the price of a round trip."""

    def in_transaction(self, proxied: PoolProxiedConnection) -> bool | None:  # noqa: ARG002 cannot be asked
        """Return `None`."""
        return None

    def send(self, proxied: PoolProxiedConnection, statement: str, done: Callable[[], None]) -> None:
        """Execute by a cursor, which begins the transaction where there is none."""
        by_cursor(dbapi(proxied), statement)
        done()

    def forget(self, proxied: PoolProxiedConnection) -> None:
        """Nothing is kept."""

    def has_entered(self, proxied: PoolProxiedConnection) -> bool | None:  # noqa: ARG002 cannot be asked
        """Return `None`: a cursor waits for the statement of another thread."""
        return None

    def prepare_connect(self, arguments: dict[str, Any]) -> None:
        """Nothing is needed."""


def dbapi(proxied: PoolProxiedConnection) -> DBAPIConnection:
    """Return the DBAPI connection behind the pool's proxy."""
    return cast("DBAPIConnection", proxied.dbapi_connection)


def by_cursor(connection: DBAPIConnection, statement: str) -> None:
    """Execute `statement` without parameters and without SQLAlchemy's events."""
    cursor = connection.cursor()
    try:
        cursor.execute(statement)
    finally:
        cursor.close()
