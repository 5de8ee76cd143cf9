"""One face for both clients, so that each case is written once and tried on all of them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import redis
import redis.asyncio
from support.proxy import Proxy

from fenceguard._flow import Flow, Pause, arun, run
from fenceguard.errors import LeaseLost
from fenceguard.events import Event
from fenceguard.lease import AsyncLeaseClient, LeaseClient, Trust
from fenceguard.lease.protocol import Settle
from fenceguard.model import Grant, Lease

T = TypeVar("T")
E = TypeVar("E", bound=Event)
Kind: TypeAlias = Literal["sync", "task", "thread"]
R = "account:42"
"""The resource of most tests."""

KINDS: tuple[Kind, ...] = ("sync", "task", "thread")
"""The sync client, and the async one with either carrier of its heartbeat."""


@dataclass
class Far:
    """The test run's Redis behind a proxy."""

    link: Proxy
    url: str


class Events:
    """A listener that can be waited on."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __call__(self, event: Event) -> None:
        self._events.put(event)

    def next(self, kind: type[E], within: float = 10.0) -> E:
        """Wait for the next event of a kind; others before it are dropped."""
        deadline = time.monotonic() + within
        while True:
            event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            if isinstance(event, kind):
                return event

    def drain(self) -> list[Event]:
        events = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events


class Told:
    """Remembers the loss of a trust, and when it was told."""

    def __init__(self, trust: Trust, clock: Callable[[], float]) -> None:
        self._loss: queue.SimpleQueue[tuple[float, LeaseLost]] = queue.SimpleQueue()
        trust.on_loss(lambda lost: self._loss.put((clock(), lost)))

    def wait(self, within: float = 10.0) -> tuple[float, LeaseLost]:
        return self._loss.get(timeout=within)

    @property
    def nothing(self) -> bool:
        return self._loss.empty()


class Face:
    """A client of any kind, spoken to by plain calls."""

    def __init__(self, kind: Kind, url: str, loop: Loop | None, **options: Any) -> None:
        self.kind, self.events, self._loop = kind, Events(), loop
        options = {"listener": self.events, **options}
        self.redis: Any
        self.client: Any
        if loop is None:
            self.redis = redis.Redis.from_url(url)
            self.client = LeaseClient(self.redis, **options)
        else:
            self.redis = redis.asyncio.Redis.from_url(url)
            self.client = AsyncLeaseClient(self.redis, **options)

    def try_acquire(self, resource: str) -> Grant | None:
        return self._call(self.client.try_acquire(resource))

    def got(self, resource: str) -> Grant:
        """Acquire what must be free."""
        grant = self.try_acquire(resource)
        assert grant is not None
        return grant

    def acquire(self, resource: str, *, wait: float) -> Grant:
        return self._call(self.client.acquire(resource, wait=wait))

    def renew(self, grant: Grant) -> Grant:
        return self._call(self.client.renew(grant))

    def release(self, grant: Grant) -> bool:
        return self._call(self.client.release(grant))

    def inspect(self, resource: str) -> Lease | None:
        return self._call(self.client.inspect(resource))

    def lift(self, grant: Grant, *, above: int) -> Grant:
        return self._call(self.client.lift(grant, above=above))

    def warm(self) -> None:
        """Connect, and make every script known: the next reply is then that of the script itself."""
        grant = self.lift(self.renew(self.got("warm")), above=1)
        self.inspect("warm")
        self.release(grant)

    @contextlib.contextmanager
    def heartbeat(self, grant: Grant, **options: Any) -> Iterator[Trust]:
        if self._loop is None:
            with self.client.heartbeat(grant, **options) as trust:
                yield trust
            return
        block = self.client.heartbeat(grant, carrier=self.kind, **options)
        trust = self._call(block.__aenter__())
        try:
            yield trust
        finally:
            self._call(block.__aexit__(None, None, None))

    def drive(self, flow: Flow[T], pause: Callable[[float], object]) -> T:
        """Run a flow over the client's connections, with the test in its pauses."""
        if self._loop is None:

            def perform(step: Any) -> Any:
                if isinstance(step, Pause):
                    return bool(pause(step.seconds))
                return run(step.flow, perform) if isinstance(step, Settle) else self.client._perform(step)

            return run(flow, perform)

        async def aperform(step: Any) -> Any:
            if isinstance(step, Pause):
                return bool(await asyncio.to_thread(pause, step.seconds))
            return await (arun(step.flow, aperform) if isinstance(step, Settle) else self.client._perform(step))

        return self._loop.call(arun(flow, aperform))

    def close(self) -> None:
        self._call(self.client.close())
        self._call(self.redis.close() if self._loop is None else self.redis.aclose())

    def _call(self, outcome: Any) -> Any:
        return outcome if self._loop is None else self._loop.call(outcome)


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop")
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def tasks(self) -> list[str]:
        async def names() -> list[str]:
            return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]

        return self.call(names())

    def close(self) -> None:
        left = self.tasks()
        self.call(self._loop.shutdown_asyncgens())
        self.call(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        assert left == [], "tasks were left"
