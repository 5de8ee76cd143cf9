"""Trust: how long a holder may believe in its lease, by its own clock alone.

It begins when the question was asked, never when the answer came, and once it has ended it stays ended: the
work has been told, or may have been, and a late renewal takes nothing back.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from fenceguard.errors import LeaseLost, LostReason
from fenceguard.model import Grant, Timing

_logger = logging.getLogger("fenceguard")

Clock: TypeAlias = Callable[[], float]
"""Monotonic seconds."""

_CLOCK_ID = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_Callbacks: TypeAlias = list[Callable[[LeaseLost], object]]


def clock() -> float:
    """Monotonic seconds that go on while the machine sleeps, where there is such a clock (Linux has one)."""
    return time.clock_gettime(_CLOCK_ID)


class Trust:
    """What a holder knows of its lease while a heartbeat renews it; may be asked from any thread.

    It ends when the last renewal no longer proves the lease, when Redis says that the lease is not ours, or after
    `max_hold`; and it does not pass to a forked child.
    """

    def __init__(self, grant: Grant, *, timing: Timing, clock: Clock, max_hold: float | None = None) -> None:
        """Trust `grant` for as long as it says, and at most `max_hold` seconds from now."""
        if max_hold is not None and not max_hold > 0:
            raise ValueError(f"max_hold must be a number of seconds above 0, or None, not {max_hold}")
        # Reentrant, because a signal handler may ask while its thread is inside.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._clock = clock
        self._lasts = timing.trust_lasts
        self._grant = grant
        self._hold_until = math.inf if max_hold is None else clock() + max_hold
        self._unanswered = False
        self._loss: LeaseLost | None = None
        self._ended_at = math.inf
        self._callbacks: _Callbacks = []

    @property
    def grant(self) -> Grant:
        """The lease as last renewed or lifted."""
        return self._grant

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy: the lease is its parent's."""
        return self._pid != os.getpid()

    @property
    def lost(self) -> LeaseLost | None:
        """Why trust has ended; `None` while it has not. After the heartbeat's end the reason is ``released``."""
        if self.forked:  # before the lock, which another thread may have held when this process was made
            return LeaseLost(self._grant.resource, "forked")
        self._tell(self._look())
        return self._loss

    def remaining(self) -> float:
        """Return the seconds of trust left: zero or negative when it has ended, ``-inf`` in a forked child."""
        if self.forked:
            return -math.inf
        with self._lock:
            return min(self._until(), self._ended_at) - self._clock()

    def confirm(self) -> None:
        """Return while the lease may be trusted.

        Raises:
            LeaseLost: trust has ended, for the reason given.
        """
        lost = self.lost
        if lost is not None:
            # A new one: several threads may raise it at once.
            raise LeaseLost(lost.resource, lost.reason) from lost.__cause__

    def on_loss(self, callback: Callable[[LeaseLost], object]) -> None:
        """Have `callback` called once when trust ends before the heartbeat does; at once when it has ended.

        It is called on whichever thread notices, often the heartbeat's, and must not block. What it raises is
        logged.
        """
        if self.forked:
            return
        with self._lock:
            self._callbacks.append(callback)
            told = self._look() or self._take()
        self._tell(told)

    def lose(self, reason: LostReason, *, cause: BaseException | None = None) -> None:
        """End trust for `reason`, unless it has ended already."""
        if self.forked:
            return
        with self._lock:
            told = self._look() or self._end(reason, self._clock(), cause)
        self._tell(told)

    def asking(self) -> None:
        """Note that a renewal is being asked for: if trust ends now, it was for want of an answer."""
        self._unanswered = True

    def extend(self, asked_at: float) -> bool:
        """Trust the lease anew from `asked_at`, when a renewal was asked for that has been granted.

        Returns whether trust goes on; once ended, it does not.
        """
        self._unanswered = False
        return self._adopt(replace(self._grant, trusted_until=asked_at + self._lasts))

    def lifted(self, grant: Grant) -> None:
        """Go on under `grant`, which is the same lease with its token or another.

        Raises:
            ValueError: it is another lease.
        """
        if (grant.resource, grant.owner) != (self._grant.resource, self._grant.owner):
            raise ValueError(f"{grant} is not the lease that is held: {self._grant}")
        self._adopt(grant)

    def end(self) -> None:
        """End trust with the heartbeat: nobody is told, later questions are answered ``released``."""
        if self.forked:
            return
        with self._lock:
            told = self._look()
            self._end("released", self._clock(), None)
        self._tell(told)

    def _until(self) -> float:
        return min(self._grant.trusted_until, self._hold_until)

    def _adopt(self, grant: Grant) -> bool:
        with self._lock:
            told = self._look()
            if self._loss is None:
                # Renewals and lifts cross; each proves the lease from its own question on, the latest for longest.
                until = max(grant.trusted_until, self._grant.trusted_until)
                token = max(grant.token, self._grant.token)
                self._grant = replace(self._grant, token=token, trusted_until=until)
        self._tell(told)
        return self._loss is None

    def _look(self) -> _Callbacks:
        """Notice that time has run out; returns who has to be told."""
        with self._lock:
            until = self._until()
            if self._loss is not None or self._clock() < until:
                return []
            if until == self._hold_until:
                return self._end("max_hold", until, None)
            return self._end("store_unreachable" if self._unanswered else "suspended", until, None)

    def _end(self, reason: LostReason, at: float, cause: BaseException | None) -> _Callbacks:
        if self._loss is None:
            self._loss, self._ended_at = LeaseLost(self._grant.resource, reason), at
            self._loss.__cause__ = cause
        return self._take()

    def _take(self) -> _Callbacks:
        """Take those who wait to be told, if there is something to tell."""
        if self._loss is None:
            return []
        callbacks, self._callbacks = self._callbacks, []
        return [] if self._loss.reason == "released" else callbacks

    def _tell(self, callbacks: _Callbacks) -> None:
        loss = self._loss
        if loss is None:
            return
        for callback in callbacks:
            try:
                callback(loss)
            except Exception:
                _logger.exception("a callback failed that was told of the loss of %r", self._grant.resource)
