"""How the work inside a hold finds it: the context.

The context holds the `Hold` itself, which ends with its work. A task or thread that outlives it still sees it,
ended, and cannot begin a transaction under it; a forked child sees its parent's, which it does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from fenceguard.errors import LeaseLost, OpenTransaction, StaleToken
from fenceguard.events import Listener, Refused, tell
from fenceguard.fence.announce import Announcement
from fenceguard.guard.hold import Hold
from fenceguard.model import Grant

_ACTIVE: ContextVar[tuple[Hold, ...]] = ContextVar("fenceguard_active", default=())
_LINGERING: ContextVar[tuple[Hold, ...]] = ContextVar("fenceguard_lingering", default=())


@contextmanager
def active(hold: Hold) -> Generator[None]:
    """Put `hold` into the context for the duration of the block."""
    _ACTIVE.set((*_ACTIVE.get(), hold))
    try:
        yield
    finally:
        # No reset(): the block may end in another context than it began in (generators, callbacks).
        kept = list(reversed(_ACTIVE.get()))
        if hold in kept:
            kept.remove(hold)  # the innermost, where it was joined
        _ACTIVE.set(tuple(reversed(kept)))


def active_holds(guard: object) -> tuple[Hold, ...]:
    """Return the guard's holds around the caller, the innermost of each resource, also those that have ended."""
    return tuple({hold.resource: hold for hold in _ACTIVE.get() if hold.guard is guard}.values())


def linger(hold: Hold) -> None:
    """Remember in this context that `hold` is kept for the sake of its transactions."""
    if hold not in _LINGERING.get():
        _LINGERING.set((*_LINGERING.get(), hold))


def join(guard: object, resource: str) -> Hold | None:
    """Join the hold of `resource` in this context, also one that lingers; `None` when there is none.

    Raises:
        LeaseLost: there is one and its lease is lost.
        OpenTransaction: there was one, and a transaction that entered under it outlived its lease.
    """
    # Also what has ended: it counts for as long as its transactions are open.
    lingering = tuple(hold for hold in _LINGERING.get() if hold.transactions)
    _LINGERING.set(lingering)
    for hold in (*active_holds(guard), *(left for left in lingering if left.guard is guard)):
        if hold.resource == resource and not hold.trust.forked and _joined(hold):
            return hold
    return None


def _joined(hold: Hold) -> bool:
    if not hold.join():
        if hold in _LINGERING.get():
            raise OpenTransaction(hold.resource)
        return False
    try:
        hold.confirm()
    except LeaseLost:
        hold.leave()
        raise
    return True


class ContextGrants:
    """What a guard tells the sessions on its engine, and what they tell it; see `fenceguard.fence.hooks`."""

    def __init__(self, guard: object, *, recover: Callable[[Hold, StaleToken], None], listener: Listener) -> None:
        """`recover` claims the fence of a hold anew after a refusal, or raises."""
        self._guard = guard
        self._recover = recover
        self._listener = listener

    def at_begin(self) -> list[Grant]:
        """Return the grants under which a transaction may begin.

        Raises:
            LeaseLost: a hold in the context has ended, belongs to a parent process, or may not be trusted.
            StaleToken: a newer holder has claimed the fence, and it could not be claimed anew.
        """
        holds = active_holds(self._guard)
        for hold in holds:
            hold.confirm()
            if hold.stale is not None:
                self._recover(hold, hold.stale)
        for hold in holds:
            hold.confirm()  # once more: claiming anew takes its time
        return [hold.grant for hold in holds]

    def now(self) -> list[Grant]:
        """Return the grants to announce for the next statement, trusted or not: there Postgres judges."""
        return [hold.grant for hold in active_holds(self._guard)]

    def announced(self, transaction: Announcement) -> None:
        """Note that a transaction announces the grants."""
        for hold in active_holds(self._guard):
            hold.announced(transaction)

    @contextmanager
    def committing(self) -> Generator[None]:
        """Run a COMMIT inside this block."""
        with ExitStack() as commits:
            for hold in active_holds(self._guard):
                commits.enter_context(hold.committing())
            yield

    def refused(self, error: StaleToken) -> None:
        """Note that Postgres refused a write, if it was made under one of the grants."""
        for hold in active_holds(self._guard):
            if (hold.resource, hold.grant.token) == (error.resource, error.token):
                hold.stale = error
                tell(self._listener, Refused(error.resource, error.token, error.newest, error.table))
