"""`AsyncGuard`: for asyncio; its heartbeat is a task or a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import wraps
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast, overload

from fenceguard import _flow
from fenceguard.errors import LeaseUnavailable, StaleToken
from fenceguard.fence.announce import Announcement
from fenceguard.fence.claim_pool import AsyncClaimPool
from fenceguard.fence.session import async_sessions, attach_sessionmaker, await_in_session, has_entered_async
from fenceguard.guard.base import GuardBase
from fenceguard.guard.context import active, join, linger
from fenceguard.guard.decorator import OnUnavailable, check_template, parse_call, unwrap
from fenceguard.guard.hold import Held, Hold
from fenceguard.guard.interruption import Interruption
from fenceguard.guard.protocol import RaiseFence, Step, outlive
from fenceguard.lease import AsyncLeaseClient
from fenceguard.model import check_seconds

if TYPE_CHECKING:
    from redis.asyncio import Redis  # noqa: F401 an argument of the base
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker  # noqa: F401 as above
    from sqlalchemy.orm import Session, sessionmaker

P = ParamSpec("P")
R = TypeVar("R")


class AsyncGuard(GuardBase["Redis", "AsyncEngine", AsyncLeaseClient, AsyncClaimPool]):
    """Lets one holder at a time act on a resource, and has Postgres refuse whoever acts too late.

    Made at import, bound to its servers at start-up. Several guards in one process do not disturb each other.
    Work that awaits is told of the loss of its lease by a cancellation, which leaves `hold` as `LeaseLost`.
    """

    _carriers = ("task", "thread")
    _client_class = AsyncLeaseClient
    _claims_class = AsyncClaimPool
    _event_class = asyncio.Event
    _lock_class = asyncio.Lock

    async def close(self) -> None:
        """Give back what is kept for the sake of open transactions, and close the guard's own connections.

        The given client and engine stay open.
        """
        for hold in tuple(self._kept):
            await self._release(hold)
        for hold, keeper in tuple(self._keepers.items()):
            hold.over.set()
            await asyncio.wait({keeper})
        await self._bound.client.close()
        await self._bound.claims.close()

    def sessions(self, **options: Any) -> async_sessionmaker[AsyncSession]:
        """Return a sessionmaker on the guard's engine; `options` are those of SQLAlchemy's `async_sessionmaker`.

        Its sessions take ``grant=`` to write under a grant that is not in the context.
        """
        return async_sessions(self._bound.engine, **options)

    def attach(self, factory: async_sessionmaker[AsyncSession] | sessionmaker[Session]) -> None:
        """Make the transactions of a sessionmaker's engine announce the context's grants; also of a sync one.

        Raises:
            ValueError: it is bound to no engine yet.
        """
        attach_sessionmaker(factory, self._source)

    @asynccontextmanager
    async def hold(
        self, resource: str, *, wait: float = 0.0, session: AsyncSession | None = None
    ) -> AsyncGenerator[Held]:
        """Hold `resource` for the duration of the block, as `Guard.hold` does.

        When the lease is lost, the task is cancelled at its next await, but not while it commits, and the block
        is left with `LeaseLost`.
        """
        check_seconds("wait", wait)
        hold = join(self, resource) or await self._start(resource, wait=wait)
        try:
            interruption = Interruption(hold.trust)
            with interruption.watching(), hold.commits_in(interruption.committing), active(hold):
                hold.confirm()  # what was lost before is not told again
                yield hold.held
                if session is not None:
                    await session.flush()
            self._note_late(hold)
        finally:
            hold.leave()
            await self._end(hold)

    @overload
    def fenced(
        self,
        template: str,
        *,
        wait: float = 0.0,
        on_unavailable: Literal["raise"] = "raise",
        session: str | None = None,
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]: ...

    @overload
    def fenced(
        self, template: str, *, wait: float = 0.0, on_unavailable: Literal["skip"], session: str | None = None
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R | None]]]: ...

    def fenced(
        self,
        template: str,
        *,
        wait: float = 0.0,
        on_unavailable: OnUnavailable = "raise",
        session: str | None = None,
    ) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R | None]]]:
        """Hold a resource around each call of the decorated coroutine function or method, as `Guard.fenced`."""
        check_template(template)
        check_seconds("wait", wait)

        def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R | None]]:
            inner: Callable[P, Coroutine[Any, Any, R]]
            inner, rewrap = unwrap(function)
            call = parse_call(inner, template, session=session, on_unavailable=on_unavailable, is_async=True)

            @wraps(inner)
            async def fenced_function(*args: P.args, **kwargs: P.kwargs) -> R | None:
                resource, flushed = call.bind(args, kwargs)
                entered = False
                try:
                    async with self.hold(resource, wait=wait, session=flushed):
                        entered = True
                        return await inner(*args, **kwargs)
                except LeaseUnavailable:
                    if entered or on_unavailable == "raise":
                        raise
                    return None

            return cast("Callable[P, Coroutine[Any, Any, R | None]]", rewrap(fenced_function))

        return decorate

    async def _start(self, resource: str, *, wait: float) -> Hold:
        """Acquire the lease, start its heartbeat and claim the fence; what is begun is undone if a step fails."""
        client, began = self._bound.client, monotonic()
        grant = await client.acquire(resource, wait=wait)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.release, grant)
            heartbeat = client.heartbeat(grant, max_hold=self._max_hold, carrier=self._carrier)
            trust = await stack.enter_async_context(heartbeat)
            granted_at = monotonic()
            with Interruption(trust).watching():
                claimed = await _flow.arun(self._claiming(trust, began=began, wait=wait), self._perform)
            hold = self._claimed(trust, claimed, began=granted_at)
            hold.loop = asyncio.get_running_loop()
            self._kept[hold] = stack.pop_all()
        return hold

    async def _end(self, hold: Hold) -> None:
        """End a hold that nobody uses, or keep its lease while a transaction that entered under it is open."""
        if hold.used:
            return
        entered: frozenset[Announcement] = frozenset()
        try:
            entered = frozenset([one for one in hold.transactions if await has_entered_async(one)])
        finally:
            if not entered:
                await self._release(hold)
        if entered:
            self._linger(hold, entered)

    def _linger(self, hold: Hold, transactions: frozenset[Announcement]) -> None:
        linger(hold)
        loop = asyncio.get_running_loop()

        def ended() -> None:
            with suppress(RuntimeError):  # the loop has ended, and the lease will with its ttl
                loop.call_soon_threadsafe(hold.over.set)

        if hold.keep(transactions, until=monotonic() + self._timing.ttl, ended=ended):
            self._keepers[hold] = asyncio.create_task(self._keep(hold), name="fenceguard-keep")

    async def _keep(self, hold: Hold) -> None:
        async def perform(pause: _flow.Pause) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause.seconds):
                    await hold.over.wait()
            hold.over.clear()

        try:
            if await _flow.arun(outlive(hold, clock=monotonic), perform):
                self._note_outlived(hold)
        finally:
            await self._release(hold)
            if self._keepers.get(hold) is asyncio.current_task():  # and no later one
                del self._keepers[hold]

    async def _release(self, hold: Hold) -> None:
        if hold.end_if_unused():
            await self._kept.pop(hold).aclose()

    def _recover(self, hold: Hold, refusal: StaleToken) -> None:
        reclaimed = self._reclaim(hold, refusal)
        if hold.loop is None or hold.loop is _running_loop():
            await_in_session(reclaimed)
        else:  # a sync session in a thread
            asyncio.run_coroutine_threadsafe(reclaimed, hold.loop).result()

    async def _reclaim(self, hold: Hold, refusal: StaleToken) -> None:
        async with hold.recovery:
            with hold.losing():
                if hold.stale is refusal:  # else another task of this hold was quicker
                    hold.recovered(await _flow.arun(self._reclaiming(hold, refusal), self._perform), refusal)

    async def _perform(self, step: Step) -> object:
        if isinstance(step, RaiseFence):
            return await self._bound.claims.claim(step.grant, wait=step.wait)
        return await self._bound.client.lift(step.grant, above=step.above)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
