"""A hold: a lease with its heartbeat and its claimed fence. The guard keeps a `Hold`, the work is given its `Held`.

The lease is kept while somebody uses the hold, and then until the transactions that entered under it have ended.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from fenceguard.errors import LeaseLost, StaleToken
from fenceguard.fence.announce import Announcement, Committing
from fenceguard.lease import Trust
from fenceguard.model import Claim, Grant


class Hold:
    """What a guard keeps of a hold; may be used from any thread.

    Attributes:
        guard: the guard that holds it.
        trust: how long its lease may be believed in.
        stale: the refusal after which the fence has to be claimed anew, if there was one.
        ended: whether it has ended, and with it the lease.
        held: what its users are given.
        over: event of the guard's kind (thread or task), set when a transaction that it is kept for ends.
        recovery: lock of the guard's kind, held while the fence is claimed anew.
        loop: the event loop of an `AsyncGuard`'s hold.
    """

    def __init__(self, guard: object, trust: Trust, *, over: Any, recovery: Any) -> None:
        """Begin with one user."""
        self.guard = guard
        self.trust = trust
        self.over = over
        self.recovery = recovery
        self.loop: asyncio.AbstractEventLoop | None = None
        self.held = Held(self)
        self.stale: StaleToken | None = None
        self.ended = False
        self._users = 1
        self._keep_until: float | None = None
        self._transactions: frozenset[Announcement] = frozenset()
        self._watched: frozenset[Announcement] = frozenset()
        self._commit_contexts: tuple[Committing, ...] = ()
        self._lock = threading.Lock()

    @property
    def grant(self) -> Grant:
        """The lease as last renewed."""
        return self.trust.grant

    @property
    def resource(self) -> str:
        """What is held."""
        return self.trust.grant.resource

    def confirm(self) -> None:
        """Return while this process may trust the lease; raises `LeaseLost` otherwise, also after the end."""
        if self.ended:
            raise LeaseLost(self.resource, "released")
        self.trust.confirm()

    # -- its users

    @property
    def used(self) -> bool:
        """Whether somebody uses it."""
        return self._users > 0

    def join(self) -> bool:
        """Use it once more, unless it has ended; returns whether it is used."""
        with self._lock:
            self._users += not self.ended
            return not self.ended

    def leave(self) -> None:
        """Use it once less."""
        with self._lock:
            self._users -= 1

    def end_if_unused(self) -> bool:
        """End it unless somebody uses it; returns whether this call ended it."""
        with self._lock:
            self._keep_until = None
            ends = not (self._users or self.ended)
            self.ended |= ends
            return ends

    # -- the transactions that may have entered under it

    @property
    def transactions(self) -> frozenset[Announcement]:
        """Those that have not ended."""
        return frozenset(transaction for transaction in self._transactions if not transaction.over)

    def announced(self, transaction: Announcement) -> None:
        """Note that a transaction announces its grant."""
        if transaction not in self._transactions:
            with self._lock:
                self._transactions = self.transactions | {transaction}

    def keep(self, transactions: frozenset[Announcement], *, until: float, ended: Callable[[], object]) -> bool:
        """Keep it for these transactions, which have entered, until an instant at most.

        Each calls `ended` as it ends. Returns whether nobody sees to this yet; who does ends with `end_if_unused`.
        """
        with self._lock:
            begins, self._keep_until = self._keep_until is None, until
            self._transactions = transactions
            for transaction in transactions - self._watched:
                transaction.on_end.append(ended)
            self._watched = transactions
            return begins

    def kept_until(self) -> float:
        """Return the instant at which it is given up, for the sake of whatever transaction."""
        return -math.inf if self._keep_until is None else self._keep_until

    @contextmanager
    def commits_in(self, context: Committing) -> Generator[None]:
        """Have every COMMIT under it run in `context` for the duration of the block."""
        with self._lock:
            self._commit_contexts += (context,)
        try:
            yield
        finally:
            with self._lock:
                self._commit_contexts = tuple(other for other in self._commit_contexts if other != context)

    @contextmanager
    def committing(self) -> Generator[None]:
        """Run a COMMIT inside this block."""
        with ExitStack() as stack:
            for context in self._commit_contexts:
                stack.enter_context(context())
            yield

    # -- its claim

    @contextmanager
    def losing(self) -> Generator[None]:
        """End trust when the block raises `LeaseLost`, which says that Redis has another owner."""
        try:
            yield
        except LeaseLost as lost:
            self.trust.lose(lost.reason)
            raise

    def recovered(self, grant: Grant, refusal: StaleToken) -> None:
        """Go on under `grant`, whose fence was claimed after `refusal`."""
        self.trust.lifted(grant)
        if self.stale is refusal:
            self.stale = None


class Held:
    """A lease with its claimed fence, for as long as a hold lasts."""

    def __init__(self, hold: Hold) -> None:
        """Made by a guard."""
        self._hold = hold

    @property
    def resource(self) -> str:
        """What is held."""
        return self._hold.resource

    @property
    def token(self) -> int:
        """The fencing token; a larger one after the fence had to be claimed anew."""
        return self._hold.grant.token

    @property
    def grant(self) -> Grant:
        """The lease as last renewed."""
        return self._hold.grant

    @property
    def claim(self) -> Claim:
        """The claim, for `fenceguard.fence`."""
        grant = self._hold.grant
        return Claim(grant.resource, grant.token, grant.owner)

    def remaining(self) -> float:
        """Return the seconds of trust left; zero or negative when it has ended."""
        return self._hold.trust.remaining()

    def confirm(self) -> None:
        """Return while this process may trust its lease.

        Raises:
            LeaseLost: it may not, for the reason given; also when the hold has ended, or in a forked child.
        """
        self._hold.confirm()

    def __repr__(self) -> str:
        """Show what is held under which token."""
        return f"<Held {self.resource!r} token={self.token} remaining={self.remaining():.3f}>"
