"""Plays the driver of a flow by hand, with a clock that moves only when told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fenceguard._flow import Flow
from fenceguard.events import Event
from fenceguard.lease.protocol import Settle, Terms
from fenceguard.lease.scripts import Keys
from fenceguard.model import Grant, Timing


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Talk:
    """A flow under way: its last step, and its result or error once it has ended.

    A flow to be settled is entered, as the drivers do: its steps are the talk's until it ends.
    """

    def __init__(self, flow: Flow[Any]) -> None:
        self._flows = [flow]
        self._interruption: BaseException | None = None
        self.ended = False
        self.step: Any = None
        self.result: Any = None
        self._go(lambda: next(flow))

    @property
    def settling(self) -> bool:
        """Whether the step belongs to a flow that a cancellation does not reach."""
        return len(self._flows) > 1

    def answer(self, answer: object) -> Any:
        """Answer the step; return the next one."""
        return self._go(lambda: self._flows[-1].send(answer))

    def fail(self, error: BaseException) -> Any:
        """Fail the step; return the next one."""
        return self._go(lambda: self._flows[-1].throw(error))

    def interrupt(self, error: BaseException) -> Any:
        """Cancel the flow: now, or once what is to be settled has ended."""
        if not self.settling:
            return self.fail(error)
        self._interruption = error
        return self.step

    def close(self) -> None:
        self._flows[0].close()

    def _go(self, move: Callable[[], Any]) -> Any:
        try:
            self.step = move()
        except StopIteration as done:
            return self._returned(done.value)
        except BaseException as error:
            if not self.settling:
                self.step, self.ended = None, True
                raise
            self._flows.pop()
            return self._go(partial(self._flows[-1].throw, self._interruption or error))
        if isinstance(self.step, Settle):
            self._flows.append(self.step.flow)
            return self._go(lambda: next(self._flows[-1]))
        return self.step

    def _returned(self, value: Any) -> Any:
        if not self.settling:
            self.step, self.ended, self.result = None, True, value
            return None
        self._flows.pop()
        if self._interruption is not None:
            return self._go(partial(self._flows[-1].throw, self._interruption))
        return self._go(partial(self._flows[-1].send, value))


class Stage:
    """Terms with a fake clock and a listener that remembers."""

    def __init__(self, *, ttl: float = 30.0) -> None:
        self.clock = FakeClock()
        self.events: list[Event] = []
        self.timing = Timing.of(ttl)
        self.terms = Terms(Keys("fenceguard"), self.timing, self.clock, self.events.append)

    def grant(self, resource: str = "account:42", *, owner: str = "me", token: int = 7) -> Grant:
        """A grant asked for now."""
        return Grant(resource, owner, token, self.timing.ttl, self.clock.now + self.terms.timing.trust_lasts)
