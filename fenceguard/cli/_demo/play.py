"""The order of things in one run: who acts when, who is frozen when."""

from __future__ import annotations

from dataclasses import asdict
from time import monotonic
from typing import Any, Final

from fenceguard.cli._demo.crew import Worker
from fenceguard.cli._demo.stage import Stage
from fenceguard.cli._demo.story import DemoError, Event, Order, Outcome, Run

STEP_WITHIN: Final = 20.0
"""Seconds within which a worker must have done what it was told; a healthy one takes milliseconds."""


def play(run: Run, a: Worker, b: Worker, built: Stage) -> Outcome:
    """Play one run; a failure ends it and becomes its outcome's `problem`."""
    outcome = Outcome(run)
    try:
        for worker in (a, b):
            worker.say(asdict(built.job(run, worker.name)))
        for worker in (a, b):
            _hear(worker, "ready")
        _Play(outcome, a, b).perform()
    except DemoError as error:
        outcome.problem = str(error)
    return outcome


class _Play:
    def __init__(self, outcome: Outcome, a: Worker, b: Worker) -> None:
        self._outcome = outcome
        self._a, self._b = a, b
        self._began_at = monotonic()

    def perform(self) -> None:
        self._a_begins_and_is_frozen()
        self._b_takes_over()
        self._a_runs_on()

    def _a_begins_and_is_frozen(self) -> None:
        _tell(self._a, "go")
        self._note(self._a, "acquired")
        self._note(self._a, "read")
        self._a.freeze(within=STEP_WITHIN)
        self._add(self._a, "frozen")

    def _b_takes_over(self) -> None:
        _tell(self._b, "go")
        if self._note(self._b, "busy", "acquired") == "busy":
            self._note(self._b, "acquired")
        self._note(self._b, "read")
        _tell(self._b, "write")
        self._note(self._b, "committed")
        self._note(self._b, "released")

    def _a_runs_on(self) -> None:
        self._a.thaw()
        self._add(self._a, "woken")
        _tell(self._a, "write")
        if self._note(self._a, "refused", "committed") == "committed":
            self._note(self._a, "lost", "released")

    def _note(self, worker: Worker, *expected: str) -> str:
        """Wait until the worker says one of the `expected`, and note it."""
        message = _hear(worker, *expected)
        what: str = message.pop("what")
        self._add(worker, what, **message)
        return what

    def _add(self, worker: Worker, what: str, **facts: Any) -> None:
        self._outcome.events.append(Event(monotonic() - self._began_at, worker.name, what, facts))


def _tell(worker: Worker, order: Order) -> None:
    worker.say({"do": order})


def _hear(worker: Worker, *expected: str) -> dict[str, Any]:
    message = worker.hear(within=STEP_WITHIN)
    if message["what"] not in expected:
        facts = ", ".join(f"{name} {value}" for name, value in message.items() if name != "what")
        raise DemoError(
            f"worker {worker.name} should have {' or '.join(expected)}, but {message['what']}"
            + (f" ({facts})" if facts else "")
        )
    return message
