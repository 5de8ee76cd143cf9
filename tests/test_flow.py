"""The two drivers do the same: each step's answer, or its error, goes into the flow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fenceguard._flow import Flow, Pause, arun, run

Perform = Callable[[Any], object]
Drive = Callable[[Flow[Any], Perform], Any]


def drive_sync(flow: Flow[Any], perform: Perform) -> Any:
    return run(flow, perform)


def drive_async(flow: Flow[Any], perform: Perform) -> Any:
    async def awaitable(step: Any) -> object:
        await asyncio.sleep(0)
        return perform(step)

    async def main() -> Any:
        return await arun(flow, awaitable)

    return asyncio.run(main())


@pytest.fixture(params=[drive_sync, drive_async], ids=["run", "arun"])
def drive(request: pytest.FixtureRequest) -> Drive:
    chosen: Drive = request.param
    return chosen


def test_answers_go_in_and_the_last_value_comes_out(drive: Drive) -> None:
    def flow() -> Flow[list[int]]:
        first = yield 1
        second = yield 2
        return [first, second]

    assert drive(flow(), lambda step: step * 10) == [10, 20]


def test_a_flow_without_a_step_returns_at_once(drive: Drive) -> None:
    def flow() -> Flow[str]:
        return "done"
        yield

    performed: list[Any] = []
    assert drive(flow(), performed.append) == "done"
    assert not performed


def test_a_step_s_error_is_the_flow_s_to_handle(drive: Drive) -> None:
    def flow() -> Flow[str]:
        try:
            yield "fails"
        except OSError as error:
            answer = yield "again"
            return f"{error}, then {answer}"
        return "no error"

    def perform(step: str) -> str:
        if step == "fails":
            raise OSError("cut")
        return "well"

    assert drive(flow(), perform) == "cut, then well"


def test_a_flow_may_end_on_an_error(drive: Drive) -> None:
    def flow() -> Flow[str]:
        try:
            yield "fails"
        except OSError:
            return "given up"
        return "no error"

    assert drive(flow(), _fail) == "given up"


def test_an_error_that_the_flow_does_not_handle_is_the_caller_s(drive: Drive) -> None:
    closed: list[str] = []

    def flow() -> Flow[None]:
        try:
            yield "fails"
        finally:
            closed.append("closed")

    with pytest.raises(OSError, match="cut"):
        drive(flow(), _fail)
    assert closed == ["closed"]


def test_an_error_that_the_flow_makes_of_it_keeps_its_cause(drive: Drive) -> None:
    def flow() -> Flow[None]:
        try:
            yield "fails"
        except OSError as error:
            raise LookupError("lost") from error

    with pytest.raises(LookupError, match="lost") as caught:
        drive(flow(), _fail)
    assert isinstance(caught.value.__cause__, OSError)


def test_an_interrupt_goes_through_the_flow_too(drive: Drive) -> None:
    seen: list[type[BaseException]] = []

    def flow() -> Flow[None]:
        try:
            yield "interrupted"
        except BaseException as error:
            seen.append(type(error))
            raise

    class Interrupt(BaseException):
        pass

    def perform(_: Any) -> object:
        raise Interrupt

    with pytest.raises(Interrupt):
        drive(flow(), perform)
    assert seen == [Interrupt]


def test_an_error_after_an_error_is_the_flow_s_as_well(drive: Drive) -> None:
    def flow() -> Flow[int]:
        failures = 0
        while failures < 3:
            try:
                yield "fails"
            except OSError:
                failures += 1
        return failures

    assert drive(flow(), _fail) == 3


def test_flows_are_made_of_flows(drive: Drive) -> None:
    def ask(number: int) -> Flow[int]:
        answer: int = yield number
        return answer + 1

    def flow() -> Flow[list[int]]:
        return [(yield from ask(1)), (yield from ask(2))]

    assert drive(flow(), lambda step: step * 10) == [11, 21]


async def test_a_cancellation_reaches_the_flow_and_the_task_ends_cancelled() -> None:
    waiting = asyncio.Event()
    seen: list[str] = []

    def flow() -> Flow[None]:
        try:
            yield "hangs"
        except asyncio.CancelledError:
            seen.append("cancelled")
            yield "cleans up"
            raise

    async def perform(step: str) -> None:
        seen.append(step)
        if step == "hangs":
            waiting.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(arun(flow(), perform))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["hangs", "cancelled", "cleans up"]
    assert task.cancelled()


def test_a_pause_is_a_value() -> None:
    assert Pause(1.5) == Pause(seconds=1.5)
    assert Pause(1.5) != Pause(2.0)


def _fail(_: Any) -> object:
    raise OSError("cut")
