"""Being ended from outside, so that what a command has put up is taken down first."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from fenceguard.cli._output import complain

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_signals() -> Generator[None]:
    """Inside the block Ctrl-C, SIGTERM and SIGHUP raise `SystemExit` with 128 + signal, once.

    Further ones are ignored from then on, for the way out is bounded.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        complain(f"ended by {signal.Signals(number).name}; taking down what was put up")
        raise SystemExit(128 + number)

    before = {each: signal.signal(each, end) for each in ENDING}
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def undisturbed() -> Generator[None]:
    """Inside the block those signals are ignored: for taking things down."""
    before = {each: signal.signal(each, signal.SIG_IGN) for each in ENDING}
    try:
        yield
    finally:
        _restore(before)


def _restore(before: dict[signal.Signals, Any]) -> None:
    for each, handler in before.items():
        signal.signal(each, handler)
