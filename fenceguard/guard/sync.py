"""`Guard`: for synchronous code; its heartbeat is a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import wraps
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast, overload

from fenceguard import _flow
from fenceguard.errors import LeaseUnavailable, StaleToken
from fenceguard.fence.announce import Announcement
from fenceguard.fence.claim_pool import ClaimPool
from fenceguard.fence.session import attach_sessionmaker, has_entered, sessions
from fenceguard.guard.base import GuardBase
from fenceguard.guard.context import active, join, linger
from fenceguard.guard.decorator import OnUnavailable, check_template, parse_call, unwrap
from fenceguard.guard.hold import Held, Hold
from fenceguard.guard.protocol import RaiseFence, Step, outlive
from fenceguard.lease import LeaseClient
from fenceguard.model import check_seconds

if TYPE_CHECKING:
    from redis import Redis  # noqa: F401 an argument of the base
    from sqlalchemy import Engine  # noqa: F401 as above
    from sqlalchemy.orm import Session, sessionmaker

P = ParamSpec("P")
R = TypeVar("R")


class Guard(GuardBase["Redis", "Engine", LeaseClient, ClaimPool]):
    """Lets one holder at a time act on a resource, and has Postgres refuse whoever acts too late.

    Made at import, bound to its servers at start-up. Several guards in one process do not disturb each other.
    """

    _carriers = ("thread",)
    _client_class = LeaseClient
    _claims_class = ClaimPool
    _event_class = threading.Event
    _lock_class = threading.Lock

    def close(self) -> None:
        """Give back what is kept for the sake of open transactions, and close the guard's own connections.

        The given client and engine stay open.
        """
        for hold in tuple(self._kept):
            self._release(hold)
        for hold, keeper in tuple(self._keepers.items()):
            hold.over.set()
            keeper.join()
        self._bound.client.close()
        self._bound.claims.close()

    def sessions(self, **options: Any) -> sessionmaker[Session]:
        """Return a sessionmaker on the guard's engine; `options` are those of SQLAlchemy's `sessionmaker`.

        Its sessions take ``grant=`` to write under a grant that is not in the context.
        """
        return sessions(self._bound.engine, **options)

    def attach(self, factory: sessionmaker[Session]) -> None:
        """Make the transactions of a sessionmaker's engine announce the context's grants.

        Raises:
            ValueError: it is bound to no engine yet.
        """
        attach_sessionmaker(factory, self._source)

    @contextmanager
    def hold(self, resource: str, *, wait: float = 0.0, session: Session | None = None) -> Generator[Held]:
        """Hold `resource` for the duration of the block: lease, heartbeat and claim.

        A hold of a resource that the context holds already joins it: it shares lease and token, and does not
        exclude it.

        Args:
            resource: 1 to 512 bytes of UTF-8 without control characters.
            wait: seconds to wait for the lease; 0 tries once. The claim has what is left of it, at least
                ``claim_wait``.
            session: is flushed before the hold ends.

        Raises:
            LeaseUnavailable: somebody else holds it, also after `wait`; the block does not run.
            LeaseLost: the lease ended before the block could begin.
            ClaimTimeout: open transactions of earlier holders kept the claim waiting.
            StoreUnreachable: Redis or Postgres gave no usable answer.
            SchemaMissing: the database lacks fenceguard's schema, or has one that does not fit.
            OpenTransaction: a transaction that wrote under an earlier hold of the resource here is still open,
                one ttl after that hold. (Until then such a hold keeps its lease, and this one joins it.)
        """
        check_seconds("wait", wait)
        hold = join(self, resource) or self._start(resource, wait=wait)
        try:
            with active(hold):
                yield hold.held
                if session is not None:
                    session.flush()
            self._note_late(hold)
        finally:
            hold.leave()
            self._end(hold)

    @overload
    def fenced(
        self,
        template: str,
        *,
        wait: float = 0.0,
        on_unavailable: Literal["raise"] = "raise",
        session: str | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    @overload
    def fenced(
        self, template: str, *, wait: float = 0.0, on_unavailable: Literal["skip"], session: str | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...

    def fenced(
        self,
        template: str,
        *,
        wait: float = 0.0,
        on_unavailable: OnUnavailable = "raise",
        session: str | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Hold a resource around each call of the decorated function or method.

        Args:
            template: the resource, with fields over the parameters and their attributes:
                ``"account:{account_id}"``, ``"{self.tenant}/{order.id}"``.
            wait: as in `hold`.
            on_unavailable: ``"raise"`` lets `LeaseUnavailable` through; ``"skip"`` returns `None` instead of
                calling the function, for jobs that somebody else is doing already.
            session: path to the caller's open session, ``"self.session"``, to be flushed before the hold ends.

        Raises:
            TypeError: at decoration; the function is async or a generator, or lacks a parameter that the
                template names.
            ValueError: at decoration; the template is malformed.
        """
        check_template(template)
        check_seconds("wait", wait)

        def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
            inner: Callable[P, R]
            inner, rewrap = unwrap(function)
            call = parse_call(inner, template, session=session, on_unavailable=on_unavailable, is_async=False)

            @wraps(inner)
            def fenced_function(*args: P.args, **kwargs: P.kwargs) -> R | None:
                resource, flushed = call.bind(args, kwargs)
                entered = False
                try:
                    with self.hold(resource, wait=wait, session=flushed):
                        entered = True
                        return inner(*args, **kwargs)
                except LeaseUnavailable:
                    if entered or on_unavailable == "raise":
                        raise
                    return None

            return cast("Callable[P, R | None]", rewrap(fenced_function))

        return decorate

    def _start(self, resource: str, *, wait: float) -> Hold:
        """Acquire the lease, start its heartbeat and claim the fence; what is begun is undone if a step fails."""
        client, began = self._bound.client, monotonic()
        grant = client.acquire(resource, wait=wait)
        with ExitStack() as stack:
            stack.callback(client.release, grant)
            trust = stack.enter_context(client.heartbeat(grant, max_hold=self._max_hold))
            granted_at = monotonic()
            claimed = _flow.run(self._claiming(trust, began=began, wait=wait), self._perform)
            hold = self._claimed(trust, claimed, began=granted_at)
            self._kept[hold] = stack.pop_all()
        return hold

    def _end(self, hold: Hold) -> None:
        """End a hold that nobody uses, or keep its lease while a transaction that entered under it is open."""
        if hold.used:
            return
        entered: frozenset[Announcement] = frozenset()
        try:
            entered = frozenset(transaction for transaction in hold.transactions if has_entered(transaction))
        finally:
            if not entered:
                self._release(hold)
        if entered:
            self._linger(hold, entered)

    def _linger(self, hold: Hold, transactions: frozenset[Announcement]) -> None:
        linger(hold)
        if hold.keep(transactions, until=monotonic() + self._timing.ttl, ended=hold.over.set):
            keeper = threading.Thread(target=self._keep, args=(hold,), name="fenceguard-keep", daemon=True)
            self._keepers[hold] = keeper
            keeper.start()

    def _keep(self, hold: Hold) -> None:
        def perform(pause: _flow.Pause) -> None:
            hold.over.wait(pause.seconds)
            hold.over.clear()

        try:
            if _flow.run(outlive(hold, clock=monotonic), perform):
                self._note_outlived(hold)
        finally:
            self._release(hold)
            if self._keepers.get(hold) is threading.current_thread():  # and no later one
                del self._keepers[hold]

    def _release(self, hold: Hold) -> None:
        if hold.end_if_unused():
            self._kept.pop(hold).close()

    def _recover(self, hold: Hold, refusal: StaleToken) -> None:
        with hold.recovery, hold.losing():
            if hold.stale is refusal:  # else another thread of this hold was quicker
                hold.recovered(_flow.run(self._reclaiming(hold, refusal), self._perform), refusal)

    def _perform(self, step: Step) -> object:
        if isinstance(step, RaiseFence):
            return self._bound.claims.claim(step.grant, wait=step.wait)
        return self._bound.client.lift(step.grant, above=step.above)
