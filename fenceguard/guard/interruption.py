"""How the loss of a lease reaches work that awaits.

The task of the work is cancelled, as `asyncio.timeout` does it, and the cancellation is turned into
`LeaseLost` where the work ends. A cancellation from outside stays one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

from fenceguard.errors import LeaseLost
from fenceguard.lease import Trust


class Interruption:
    """Cancels the task that made it when trust is lost, but never while it commits."""

    def __init__(self, trust: Trust) -> None:
        """Watch `trust` on behalf of the current task; must be made inside one."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a hold of AsyncGuard needs a running asyncio task")
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._cancelled_before = task.cancelling()
        self._commits = 0
        self._waiting = self._requested = self._over = False
        self._trust = trust
        trust.on_loss(self._lost)

    @contextmanager
    def committing(self) -> Generator[None]:
        """Put the cancellation off until the COMMIT in this block has been answered."""
        self._commits += 1
        try:
            yield
        finally:
            self._commits -= 1
            if self._waiting and not self._commits:
                # Not at once: this runs in the task itself, whose last await this may have been.
                self._loop.call_soon(self._interrupt)

    @contextmanager
    def watching(self) -> Generator[None]:
        """Run the work in this block; raises `LeaseLost` in place of the cancellation that the loss caused."""
        try:
            yield
        except BaseException as error:
            self._over = True
            lost = self._trust.lost
            if self._explains(error) and lost is not None:
                raise LeaseLost(lost.resource, lost.reason) from error
            raise
        else:
            self._over = True
            if self._requested:
                self._task.uncancel()  # the work has swallowed it

    def _lost(self, _: LeaseLost) -> None:
        if not self._noticed_by_the_work():
            self._loop.call_soon_threadsafe(self._interrupt)

    def _noticed_by_the_work(self) -> bool:
        """Tell whether the loss is being raised in the task itself, by `confirm` or a BEGIN."""
        try:
            return asyncio.current_task() is self._task
        except RuntimeError:  # a thread without a loop
            return False

    def _interrupt(self) -> None:
        if self._over or self._requested:
            return
        self._waiting = self._commits > 0
        if not self._waiting:
            self._requested = True
            self._task.cancel()

    def _explains(self, error: BaseException) -> bool:
        if self._requested and self._task.uncancel() > self._cancelled_before:
            return False  # cancelled from outside as well
        leaves = tuple(_leaves(error))
        if leaves != (error,):  # of a group
            return all(isinstance(leaf, LeaseLost | asyncio.CancelledError) for leaf in leaves)
        return self._requested and isinstance(error, asyncio.CancelledError)


def _leaves(error: BaseException) -> Generator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        for member in group.exceptions:
            yield from _leaves(member)
    else:
        yield error
