"""Waiting for what nothing announces, so that only polling can tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

PATIENCE = 20.0
"""Seconds after which a test that waits for an event gives up; reached only when it fails."""
EVERY = 0.002


def until(condition: Callable[[], object], what: str = "the event", *, within: float = PATIENCE) -> float:
    """Wait until `condition` holds; return the seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within, f"{what}: not within {within} s"
        time.sleep(EVERY)
    return time.monotonic() - began


async def until_async(
    condition: Callable[[], Awaitable[object]], what: str = "the event", *, within: float = PATIENCE
) -> None:
    """Wait as `until` does, in an event loop."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < within, f"{what}: not within {within} s"
        await asyncio.sleep(EVERY)
