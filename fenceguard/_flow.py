"""Flows: logic that decides in values and leaves every act to a driver.

A flow is a generator. It yields the step it wants done and is sent the answer, or thrown the error that the
step ended with. The two drivers below are all that differs between the sync and the async side, so retries,
deadlines, loss and trust are written once and tested with canned answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

R = TypeVar("R")

Flow: TypeAlias = Generator[Any, Any, R]
"""Yields steps, is sent their answers, returns an ``R``."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait `seconds`, or less when the driver's owner asks the flow to end; answered with whether it did."""

    seconds: float


def run(flow: Flow[R], perform: Callable[[Any], object]) -> R:
    """Drive `flow` to its end with a blocking `perform(step) -> answer`; errors go into the flow."""
    try:
        step = next(flow)
        while True:
            try:
                answer = perform(step)
            except BaseException as error:  # noqa: BLE001 the flow decides, also about an interrupt
                step = flow.throw(error)
            else:
                step = flow.send(answer)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


async def arun(flow: Flow[R], perform: Callable[[Any], Awaitable[object]]) -> R:
    """Drive `flow` as `run` does, with an awaitable `perform`; a cancellation goes into the flow as well."""
    try:
        step = next(flow)
        while True:
            try:
                answer = await perform(step)
            except BaseException as error:  # noqa: BLE001 the flow decides, also about a cancellation
                step = flow.throw(error)
            else:
                step = flow.send(answer)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
