"""`AsyncLeaseClient`: for asyncio; its heartbeat is a task, or a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, Self, TypeAlias, TypeVar

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis, RedisCluster

from fenceguard._flow import Flow, Pause, arun
from fenceguard.lease import protocol
from fenceguard.lease.base import ClientBase, Edge
from fenceguard.lease.client import heartbeat_failed, unreachable
from fenceguard.lease.protocol import Settle, UnknownScript
from fenceguard.lease.scripts import Call
from fenceguard.lease.trust import Trust
from fenceguard.model import Grant, Lease

R = TypeVar("R")

_Ask: TypeAlias = Callable[[Any], Coroutine[Any, Any, Any]]


class AsyncLeaseClient(ClientBase["Redis | RedisCluster"]):
    """Leases in Redis, for asyncio; the async twin of `LeaseClient`, over the same protocol.

    May be used from any event loop, and has connections for the last one. Closed with `close` or as a context
    manager; they close too when the client is dropped or the loop ends (as `asyncio.run` ends it).
    """

    _accepts = (Redis, RedisCluster)
    _plain_pools = (ConnectionPool, BlockingConnectionPool)

    def _begin(self) -> None:
        self._store: _Store | None = None

    async def try_acquire(self, resource: str) -> Grant | None:
        """Take the lease on `resource` if it is free; as `LeaseClient.try_acquire`.

        A cancellation gives back what may have been got.
        """
        return await self._run(protocol.try_acquire(self._terms, resource, self._identity.new()))

    async def acquire(self, resource: str, *, wait: float) -> Grant:
        """Take the lease on `resource`, waiting at most `wait` seconds for it; as `LeaseClient.acquire`.

        A cancellation gives back what may have been got.
        """
        owner = self._identity.new()
        return await self._run(protocol.acquire(self._terms, resource, owner, wait=wait, jitter=random.random))

    async def renew(self, grant: Grant) -> Grant:
        """Renew the lease once, and return the grant as renewed; as `LeaseClient.renew`."""
        return await self._run(protocol.renew(self._terms, self._identity.own(grant)))

    async def release(self, grant: Grant) -> bool:
        """Give the lease back; return whether it is known to have been ours until now.

        As `LeaseClient.release`. A cancellation waits until it has been done, or given up.
        """
        return not self._identity.inherited(grant) and await self._run(protocol.release(self._terms, grant))

    async def inspect(self, resource: str) -> Lease | None:
        """Return who holds the lease on `resource`; as `LeaseClient.inspect`."""
        return await self._run(protocol.inspect(self._terms, resource))

    async def lift(self, grant: Grant, *, above: int) -> Grant:
        """As owner of the lease, take a token above `above`; as `LeaseClient.lift`."""
        return await self._run(protocol.lift(self._terms, self._identity.own(grant), above=above))

    @asynccontextmanager
    async def heartbeat(
        self, grant: Grant, *, max_hold: float | None = None, carrier: Literal["task", "thread"] = "task"
    ) -> AsyncGenerator[Trust]:
        """Renew the lease for the duration of the block, at most `max_hold` seconds; as `LeaseClient.heartbeat`.

        Args:
            grant: what was acquired.
            max_hold: seconds.
            carrier: ``"task"`` renews in this event loop and fails with it when something blocks it for longer
                than `Timing.stall_budget`; ``"thread"`` renews in a thread, over a connection of its own, and
                calls what `Trust.on_loss` was given there.

        Raises:
            LeaseLost: the lease may not be trusted any more as the block begins.
            ValueError: `max_hold` is not above 0, or there is no such carrier.
        """
        if carrier not in ("task", "thread"):
            raise ValueError(f"carrier must be 'task' or 'thread', not {carrier!r}")
        trust = self._watched(grant, max_hold)
        flow = protocol.heartbeat(self._terms, trust)
        beat = _Task(trust, flow, self._perform) if carrier == "task" else _Thread(trust, flow, self._store_here)
        beat.start()
        try:
            yield trust
        finally:
            if not trust.forked:  # a child has neither loop nor thread
                try:
                    await beat.end()
                finally:
                    trust.end()

    async def close(self) -> None:
        """Close the client's own connections."""
        store, self._store = self._store, None
        if store is not None and store.serves():  # another loop closes its own
            await store.close()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    async def _run(self, flow: Flow[R]) -> R:
        return await arun(flow, self._perform)

    async def _perform(self, step: Any) -> Any:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return False
        if isinstance(step, Settle):
            # Begun before the first await here, at which a cancellation may be waiting already.
            settled = asyncio.ensure_future(self._run(step.flow))
            await _done(settled)
            return settled.result()
        store = self._store
        if store is None or not store.serves():
            store = self._store = await self._store_here()
        return await store.ask(step)

    async def _store_here(self) -> _Store:
        store = _Store(self._redis, self._edge)
        await store.open()
        return store


class _Store:
    """Connections for one event loop."""

    def __init__(self, redis: Redis | RedisCluster, edge: Edge) -> None:
        self._edge = edge
        self._loop = asyncio.get_running_loop()
        self._places = asyncio.Semaphore(edge.max_connections)
        self._redis: Any = redis  # the signatures of redis-py are only half annotated
        pool: ConnectionPool | None = None
        if edge.own:
            # The time-out around each call counts instead: redis-py's own would run each write in a further task
            # (wait_for), which on Python 3.11 can swallow a cancellation.
            pool = ConnectionPool(**edge.settings(socket_timeout=None, socket_connect_timeout=edge.limit))
            self._redis = Redis(connection_pool=pool)
        self._closed = asyncio.Event()
        self._keeper = _keep(pool, self._closed)
        # Kept beside this object, which may die in a cycle together with connections that then complain.
        weakref.finalize(self, _let_go, self._keeper).atexit = False

    async def open(self) -> None:
        """Let the loop know of the connections, so that it closes them at its end; waits for nothing."""
        await anext(self._keeper)

    def serves(self) -> bool:
        """Tell whether the store is open and belongs to the running loop."""
        return self._loop is asyncio.get_running_loop() and not self._closed.is_set()

    async def close(self) -> None:
        """Close the connections."""
        await self._keeper.aclose()

    async def ask(self, call: Call) -> Any:
        """Make a call within its time; a connection whose answer was not waited for is closed by redis-py."""
        limit = min(2 * self._edge.limit, call.within)
        try:
            async with asyncio.timeout(limit), self._places:
                return await self._redis.execute_command(*call.words)
        except exceptions.NoScriptError:
            raise UnknownScript from None
        except TimeoutError as error:
            raise unreachable(self._edge, TimeoutError(f"waited {limit:.3f} s")) from error
        except Exception as error:
            # Not only redis-py's own: its parser, and asyncio on a lost connection, raise what they like.
            raise unreachable(self._edge, error) from error


async def _keep(pool: ConnectionPool | None, closed: asyncio.Event) -> AsyncGenerator[None]:
    """Close `pool` when this generator is closed, dropped, or outlived by its loop: asyncio sees to all three."""
    try:
        yield
    finally:
        closed.set()
        if pool is not None:
            await pool.aclose()


def _let_go(_: object) -> None:
    """Be the last to have held something."""


class _Task:
    """Carries a heartbeat in the running loop."""

    def __init__(self, trust: Trust, flow: Flow[None], ask: _Ask) -> None:
        self._trust, self._flow, self._ask = trust, flow, ask
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._beat(), name=f"fenceguard-heartbeat {self._trust.grant.resource}")

    async def end(self) -> None:
        """End the heartbeat; it asks nothing more once this returns."""
        self.hurry()
        await self.over()

    async def over(self) -> None:
        """Wait for the heartbeat's end."""
        if self._task is not None:
            await _done(self._task)
            self._task = None  # whose exception may hold this object, in a cycle

    def hurry(self) -> None:
        """Ask the heartbeat to end, also in the middle of a question, whose answer nobody needs any more."""
        self._stop.set()
        if self._task is not None:
            self._task.cancel()

    async def _beat(self) -> None:
        try:
            await arun(self._flow, self._perform)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 whatever it is, the holder is told
            if not self._stop.is_set():
                heartbeat_failed(self._trust, error)

    async def _perform(self, step: Any) -> Any:
        if not isinstance(step, Pause):
            return await self._ask(step)
        with suppress(TimeoutError):
            async with asyncio.timeout(step.seconds):
                await self._stop.wait()
        return self._stop.is_set()


class _Thread:
    """Carries a heartbeat in a thread of its own, which nothing that blocks the running loop holds up."""

    def __init__(
        self, trust: Trust, flow: Flow[None], make_store: Callable[[], Coroutine[Any, Any, _Store]]
    ) -> None:
        self._trust, self._flow, self._make_store = trust, flow, make_store
        self._ended = False
        self._hurry: Callable[[], object] | None = None
        self._over: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._over.set_running_or_notify_cancel()  # so that a cancelled waiter does not cancel it

    def start(self) -> None:
        name = f"fenceguard-heartbeat {self._trust.grant.resource}"
        # A daemon: at the interpreter's exit the lease may expire, but it must not keep the process.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def end(self) -> None:
        """End the heartbeat; it asks nothing more once this returns."""
        self._ended = True
        if self._hurry is not None:
            with suppress(RuntimeError):  # its loop has ended with it
                self._hurry()
        try:
            await _done(asyncio.wrap_future(self._over))
        finally:
            self._thread.join()  # at its last line by now

    def _main(self) -> None:
        try:
            asyncio.run(self._beat())
        except BaseException as error:  # noqa: BLE001 whatever it is, the holder is told
            heartbeat_failed(self._trust, error)
        finally:
            self._over.set_result(None)

    async def _beat(self) -> None:
        store = await self._make_store()
        try:
            carrier = _Task(self._trust, self._flow, store.ask)
            carrier.start()
            loop = asyncio.get_running_loop()
            self._hurry = lambda: loop.call_soon_threadsafe(carrier.hurry)
            if self._ended:
                carrier.hurry()
            await carrier.over()
        finally:
            await store.close()


async def _done(future: asyncio.Future[Any]) -> None:
    """Wait for the end of `future`, whatever it is; a cancellation meanwhile is raised only then."""
    interruption: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            interruption = error
    if interruption is not None:
        if not future.cancelled():
            future.exception()  # seen, and of no interest beside the cancellation
        raise interruption
