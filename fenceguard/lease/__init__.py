"""The lease: who may act on a resource now, kept in Redis.

`LeaseClient` and `AsyncLeaseClient` are the same over one protocol (`fenceguard.lease.protocol`). They know no
Postgres. A lease alone cannot stop a holder that was paused from writing later; the fence does.
"""

from __future__ import annotations

from fenceguard.lease.aio import AsyncLeaseClient as AsyncLeaseClient
from fenceguard.lease.client import LeaseClient as LeaseClient
from fenceguard.lease.trust import Trust as Trust

__all__ = ["AsyncLeaseClient", "LeaseClient", "Trust"]
