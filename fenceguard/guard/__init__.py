"""The guard: lease, heartbeat and claim as one context manager, and the decorator on top of it.

`Guard` serves synchronous code and `AsyncGuard` asyncio; both run the flows of `protocol` and keep what they
hold in the context, where the sessions of `fenceguard.fence` find it.
"""

from fenceguard.guard.aio import AsyncGuard as AsyncGuard
from fenceguard.guard.hold import Held as Held
from fenceguard.guard.sync import Guard as Guard

__all__ = ["AsyncGuard", "Guard", "Held"]
