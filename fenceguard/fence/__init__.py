"""The Postgres side: whose writes count. Knows no Redis, and takes any integer token that grows.

``claim`` raises the fence of a resource, ``enter`` proves in a transaction that it has not been raised since,
``conditional`` and ``execute_conditional`` compare row by row; ``session.attach`` makes every transaction of an
engine announce the grants it acts under.
"""

from fenceguard.fence.calls import claim, enter
from fenceguard.fence.rows import execute_conditional
from fenceguard.fence.session import (
    GrantSource,
    async_sessions,
    attach,
    attach_sessionmaker,
    has_entered,
    has_entered_async,
    sessions,
)
from fenceguard.fence.statements import conditional
from fenceguard.fence.tables import Fenced, FencedDataclass, fence_column, new_fence_column
from fenceguard.fence.unfenced import unfenced

__all__ = [
    "Fenced",
    "FencedDataclass",
    "GrantSource",
    "async_sessions",
    "attach",
    "attach_sessionmaker",
    "claim",
    "conditional",
    "enter",
    "execute_conditional",
    "fence_column",
    "has_entered",
    "has_entered_async",
    "new_fence_column",
    "sessions",
    "unfenced",
]
