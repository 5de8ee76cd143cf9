"""The lease protocol and the two drivers, without a server: canned answers and a clock that is told the time.

Both modules are covered by this file alone, branches included::

    pytest tests/lease/test_lease_flows.py --cov=fenceguard.lease.protocol --cov=fenceguard._flow \
        --cov-branch --cov-report=term-missing --cov-fail-under=100
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest
from lease_talk import Stage, Talk

from fenceguard._flow import Flow, Pause, arun, run
from fenceguard.errors import LeaseLost, LeaseUnavailable, StoreUnreachable
from fenceguard.events import Acquired, Event, Lifted, Released, Renewed
from fenceguard.lease import protocol
from fenceguard.lease.protocol import UnknownScript
from fenceguard.lease.scripts import ACQUIRE, INSPECT, LIFT, RELEASE, RENEW
from fenceguard.lease.trust import Trust
from fenceguard.model import MAX_TOKEN, Grant, Lease

NO_ANSWER = StoreUnreachable("redis", "no answer")
RESOURCE, OWNER = "account:42", "me"
GO_ON, END = False, True
"""Answers of a pause: whether the flow was asked to end."""
HELD = [b"held", b"9", b"somebody else", 1500]


class Interrupted(BaseException):
    """A cancellation, an interrupt from the keyboard."""


@pytest.fixture
def stage() -> Stage:
    return Stage()


def taking(stage: Stage) -> Talk:
    return Talk(protocol.try_acquire(stage.terms, RESOURCE, OWNER))


def waiting(stage: Stage, wait: float, jitter: float = 1.0) -> Talk:
    return Talk(protocol.acquire(stage.terms, RESOURCE, OWNER, wait=wait, jitter=lambda: jitter))


# -- acquire


def test_a_granted_lease_is_trusted_from_the_question_on_and_not_from_the_answer(stage: Stage) -> None:
    talk = taking(stage)
    stage.clock.advance(5)
    talk.answer([b"granted", b"7"])
    assert talk.result == Grant(RESOURCE, OWNER, 7, 30.0, 0.0)
    assert talk.result.trusted_until == 1000 + 30 - 3
    assert stage.events == [Acquired(RESOURCE, 7, waited=5.0)]


def test_answers_are_read_as_bytes_and_as_text(stage: Stage) -> None:
    talk = taking(stage)
    talk.answer(["granted", "7"])
    assert talk.result.token == 7


def test_the_question_names_both_keys_the_owner_and_the_ttl(stage: Stage) -> None:
    step = taking(stage).step
    assert step.keys == (b"fenceguard:{account:42}:lease", b"fenceguard:{account:42}:token")
    assert step.args == (b"me", b"30000")
    assert step.words == ("EVALSHA", ACQUIRE.sha, 2, *step.keys, *step.args)


def test_a_lease_that_somebody_else_holds_is_answered_with_none(stage: Stage) -> None:
    talk = taking(stage)
    talk.answer(HELD)
    assert talk.ended
    assert talk.result is None
    assert stage.events == []


def test_a_script_that_redis_does_not_know_is_sent_in_full_once(stage: Stage) -> None:
    talk = taking(stage)
    step = talk.fail(UnknownScript())
    assert step.words[:2] == ("EVAL", ACQUIRE.source)
    talk.answer([b"granted", b"1"])
    assert talk.result.token == 1


def test_an_unanswered_question_is_asked_again_by_the_same_owner(stage: Stage) -> None:
    talk = taking(stage)
    first = talk.step
    assert talk.fail(NO_ANSWER) == Pause(protocol.ATTEMPT_PAUSE)
    stage.clock.advance(2)
    assert talk.answer(GO_ON) == first
    talk.answer([b"granted", b"7"])
    assert talk.result.trusted_until == 1002 + 27


def test_after_the_last_attempt_what_may_have_been_got_is_given_back_and_the_want_of_an_answer_is_reported(
    stage: Stage,
) -> None:
    talk = taking(stage)
    for _ in range(protocol.ATTEMPTS - 1):
        talk.fail(NO_ANSWER)
        talk.answer(GO_ON)
    assert talk.fail(NO_ANSWER) == stage.terms.keys.release(RESOURCE, OWNER)
    assert talk.settling
    with pytest.raises(StoreUnreachable) as caught:
        talk.answer(0)
    assert caught.value is NO_ANSWER


def test_attempts_end_when_renew_every_has_gone_by(stage: Stage) -> None:
    talk = taking(stage)
    stage.clock.advance(stage.timing.renew_every)
    assert talk.fail(NO_ANSWER).script is RELEASE


def test_giving_back_may_fail_too_and_does_not_hide_the_reason(stage: Stage) -> None:
    talk = taking(stage)
    stage.clock.advance(stage.timing.renew_every)
    talk.fail(NO_ANSWER)
    stage.clock.advance(stage.timing.renew_every)
    with pytest.raises(StoreUnreachable) as caught:
        talk.fail(StoreUnreachable("redis", "another"))
    assert caught.value is NO_ANSWER


def test_an_interrupted_acquire_gives_back_what_it_may_have_got(stage: Stage) -> None:
    talk = waiting(stage, 5.0)
    assert talk.interrupt(Interrupted()).script is RELEASE
    assert talk.settling
    with pytest.raises(Interrupted):
        talk.answer(1)


def test_an_interrupted_wait_gives_back_as_well(stage: Stage) -> None:
    talk = waiting(stage, 5.0)
    assert isinstance(talk.answer(HELD), Pause)
    assert talk.interrupt(Interrupted()).script is RELEASE
    with pytest.raises(Interrupted):
        talk.answer(0)


def test_a_second_interruption_waits_until_all_has_been_given_back(stage: Stage) -> None:
    talk = waiting(stage, 5.0)
    talk.interrupt(Interrupted())
    talk.interrupt(Interrupted())
    assert talk.fail(NO_ANSWER) == Pause(protocol.ATTEMPT_PAUSE)
    assert talk.answer(GO_ON).script is RELEASE
    with pytest.raises(Interrupted):
        talk.answer(1)


def test_a_flow_that_is_dropped_asks_nothing_more(stage: Stage) -> None:
    talk = waiting(stage, 5.0)
    talk.close()  # "generator ignored GeneratorExit" if it yielded
    assert stage.events == []


def test_a_grant_whose_trust_ended_before_the_answer_is_asked_for_again(stage: Stage) -> None:
    talk = taking(stage)
    stage.clock.advance(stage.terms.timing.trust_lasts)
    assert talk.answer([b"granted", b"7"]).script is ACQUIRE
    talk.answer([b"granted", b"7"])
    assert talk.result.trusted_until == stage.clock.now + stage.terms.timing.trust_lasts


def test_answers_that_always_come_too_late_are_no_grant(stage: Stage) -> None:
    talk = taking(stage)
    for _ in range(protocol.ATTEMPTS):
        stage.clock.advance(stage.terms.timing.trust_lasts)
        talk.answer([b"granted", b"7"])
    assert talk.step.script is RELEASE
    with pytest.raises(StoreUnreachable, match="longer than the 27 s"):
        talk.answer(1)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ([b"foreign", b"fenceguard:{account:42}:lease"], "'fenceguard:{account:42}:lease' is not fenceguard's"),
        ([b"exhausted", b"fenceguard:{account:42}:token"], str(MAX_TOKEN)),
    ],
)
def test_a_key_that_cannot_serve_is_named(stage: Stage, answer: list[Any], says: str) -> None:
    talk = taking(stage)
    talk.answer(answer)
    with pytest.raises(StoreUnreachable) as caught:
        talk.answer(0)  # of the release
    assert says in str(caught.value)


def test_waiting_asks_again_until_the_lease_is_free(stage: Stage) -> None:
    talk = waiting(stage, 5.0)
    pause = talk.answer(HELD)
    stage.clock.advance(pause.seconds)
    assert talk.answer(GO_ON).script is ACQUIRE
    talk.answer([b"granted", b"10"])
    assert talk.result.token == 10
    assert stage.events == [Acquired(RESOURCE, 10, waited=pytest.approx(0.05))]


@pytest.mark.parametrize(
    ("wait", "jitter", "remaining_ms", "seconds"),
    [
        (5.0, 1.0, 1500, 0.05),  # at most
        (5.0, 0.0, 1500, 0.025),  # at least half
        (0.01, 1.0, 1500, 0.01),  # the time that is left
        (5.0, 1.0, 20, 0.02),  # the lease ends
        (5.0, 1.0, 0, 0.005),  # never a busy loop
        (5.0, 1.0, -1, 0.05),  # a lease without end
    ],
)
def test_the_pause_between_two_looks_is_bounded(
    stage: Stage, wait: float, jitter: float, remaining_ms: int, seconds: float
) -> None:
    talk = waiting(stage, wait, jitter)
    assert talk.answer([b"held", b"9", b"x", remaining_ms]).seconds == pytest.approx(seconds)


def test_waiting_looks_once_more_at_its_end_and_then_names_the_holder(stage: Stage) -> None:
    talk = waiting(stage, 0.03)
    pause = talk.answer(HELD)
    stage.clock.advance(pause.seconds)
    assert talk.answer(GO_ON).script is ACQUIRE
    with pytest.raises(LeaseUnavailable) as caught:
        talk.answer(HELD)
    assert (caught.value.resource, caught.value.owner, caught.value.retry_after) == (RESOURCE, "somebody else", 1.5)


def test_waiting_zero_tries_once(stage: Stage) -> None:
    talk = waiting(stage, 0.0)
    with pytest.raises(LeaseUnavailable):
        talk.answer(HELD)


def test_acquire_returns_a_lease_that_is_free_at_once(stage: Stage) -> None:
    talk = waiting(stage, 0.0)
    talk.answer([b"granted", b"3"])
    assert talk.result.token == 3


@pytest.mark.parametrize("wait", [-1.0, math.nan, math.inf])
def test_a_wait_that_is_no_duration_is_refused(stage: Stage, wait: float) -> None:
    with pytest.raises(ValueError, match="wait must be a finite number of seconds"):
        waiting(stage, wait)


# -- renew, release, inspect, lift


def test_a_renewal_trusts_from_its_own_question_on(stage: Stage) -> None:
    grant = stage.grant()
    stage.clock.advance(10)
    talk = Talk(protocol.renew(stage.terms, grant))
    assert (talk.step.script, talk.step.keys, talk.step.args) == (
        RENEW,
        (b"fenceguard:{account:42}:lease",),
        (b"me", b"30000"),
    )
    stage.clock.advance(1)
    talk.answer(1)
    assert talk.result == grant
    assert talk.result.trusted_until == 1010 + 27


@pytest.mark.parametrize(("answer", "reason"), [(0, "missing"), (-1, "taken_over")])
def test_a_refused_renewal_says_why(stage: Stage, answer: int, reason: str) -> None:
    talk = Talk(protocol.renew(stage.terms, stage.grant()))
    with pytest.raises(LeaseLost) as caught:
        talk.answer(answer)
    assert caught.value.reason == reason


def test_a_renewal_answered_after_its_trust_has_ended_is_no_renewal(stage: Stage) -> None:
    talk = Talk(protocol.renew(stage.terms, stage.grant()))
    stage.clock.advance(stage.terms.timing.trust_lasts)
    with pytest.raises(LeaseLost) as caught:
        talk.answer(1)
    assert caught.value.reason == "suspended"


def test_a_renewal_is_asked_for_again_and_counts_from_the_question_that_was_answered(stage: Stage) -> None:
    talk = Talk(protocol.renew(stage.terms, stage.grant()))
    talk.fail(NO_ANSWER)
    stage.clock.advance(2)
    talk.answer(GO_ON)
    talk.answer(1)
    assert talk.result.trusted_until == 1002 + 27


def test_a_renewal_that_stays_unanswered_is_not_known(stage: Stage) -> None:
    talk = Talk(protocol.renew(stage.terms, stage.grant()))
    stage.clock.advance(stage.timing.renew_every)
    with pytest.raises(StoreUnreachable):
        talk.fail(NO_ANSWER)


def test_a_release_is_seen_through_and_reports_how_long_the_lease_was_held(stage: Stage) -> None:
    grant = stage.grant()
    stage.clock.advance(4)
    talk = Talk(protocol.release(stage.terms, grant))
    assert talk.settling
    assert (talk.step.script, talk.step.args) == (RELEASE, (b"me",))
    talk.answer(1)
    assert talk.result is True
    assert stage.events == [Released(RESOURCE, 7, held=4.0)]


@pytest.mark.parametrize("answer", [0, -1])
def test_a_release_of_what_is_not_ours_says_so(stage: Stage, answer: int) -> None:
    talk = Talk(protocol.release(stage.terms, stage.grant()))
    talk.answer(answer)
    assert talk.result is False
    assert stage.events == []


def test_a_release_that_is_interrupted_is_seen_through_also_where_redis_forgot_the_script(stage: Stage) -> None:
    talk = Talk(protocol.release(stage.terms, stage.grant()))
    talk.interrupt(Interrupted())
    assert talk.fail(UnknownScript()).command == "EVAL"
    with pytest.raises(Interrupted):
        talk.answer(1)
    assert stage.events == [Released(RESOURCE, 7, held=0.0)]


def test_a_release_without_an_answer_ends_after_a_few_attempts_with_a_warning(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    talk = Talk(protocol.release(stage.terms, stage.grant()))
    for _ in range(protocol.ATTEMPTS - 1):
        talk.fail(NO_ANSWER)
        talk.answer(GO_ON)
    with caplog.at_level(logging.WARNING, logger="fenceguard"):
        talk.fail(NO_ANSWER)
    assert talk.result is False
    assert "ends with its ttl" in caplog.text


def test_inspect_tells_the_holder(stage: Stage) -> None:
    talk = Talk(protocol.inspect(stage.terms, RESOURCE))
    assert (talk.step.script, talk.step.args) == (INSPECT, ())
    talk.answer(HELD)
    assert talk.result == Lease(RESOURCE, "somebody else", 9, 1.5)


def test_inspect_of_a_free_lease_is_none(stage: Stage) -> None:
    talk = Talk(protocol.inspect(stage.terms, RESOURCE))
    talk.answer([b"free"])
    assert talk.result is None


def test_inspect_of_a_foreign_key_names_it(stage: Stage) -> None:
    talk = Talk(protocol.inspect(stage.terms, RESOURCE))
    with pytest.raises(StoreUnreachable, match="is not fenceguard's"):
        talk.answer([b"foreign", b"fenceguard:{account:42}:lease"])


def test_a_lift_takes_a_token_above_the_fence(stage: Stage) -> None:
    grant = stage.grant(token=1)
    talk = Talk(protocol.lift(stage.terms, grant, above=7))
    assert (talk.step.script, talk.step.args) == (LIFT, (b"me", b"30000", b"7"))
    stage.clock.advance(4)
    talk.answer([b"lifted", b"8"])
    assert talk.result == replace(grant, token=8)
    assert talk.result.trusted_until == 1027
    assert stage.events == [Lifted(RESOURCE, 8, refused=1)]


@pytest.mark.parametrize("reason", ["missing", "taken_over"])
def test_a_lift_of_what_is_not_ours_is_the_loss_of_it(stage: Stage, reason: str) -> None:
    talk = Talk(protocol.lift(stage.terms, stage.grant(), above=7))
    with pytest.raises(LeaseLost) as caught:
        talk.answer([reason.encode()])
    assert caught.value.reason == reason


def test_a_lift_above_the_last_token_is_refused(stage: Stage) -> None:
    talk = Talk(protocol.lift(stage.terms, stage.grant(), above=MAX_TOKEN))
    with pytest.raises(StoreUnreachable, match=str(MAX_TOKEN)):
        talk.answer([b"exhausted", b"fenceguard:{account:42}:token"])


def test_a_lift_above_no_token_is_misuse(stage: Stage) -> None:
    with pytest.raises(ValueError, match="token must lie between"):
        Talk(protocol.lift(stage.terms, stage.grant(), above=MAX_TOKEN + 1))


# -- heartbeat


def beating(stage: Stage, **options: Any) -> tuple[Talk, Trust]:
    trust = Trust(stage.grant(), timing=stage.timing, clock=stage.clock, **options)
    return Talk(protocol.heartbeat(stage.terms, trust)), trust


def test_a_heartbeat_renews_every_renew_every_counted_from_the_questions(stage: Stage) -> None:
    talk, trust = beating(stage)
    assert talk.step == Pause(10)
    stage.clock.advance(10.5)
    step = talk.answer(GO_ON)
    assert step.script is RENEW
    assert step.within == pytest.approx(27 - 10.5)
    stage.clock.advance(2)
    assert talk.answer(1) == Pause(8)
    assert trust.grant.trusted_until == 1010.5 + 27
    assert stage.events == [Renewed(RESOURCE, 7, gap=10.5)]


def test_a_heartbeat_that_is_told_to_end_asks_nothing_more(stage: Stage) -> None:
    talk, trust = beating(stage)
    talk.answer(END)
    assert talk.ended
    assert trust.lost is None


@pytest.mark.parametrize(("answer", "reason"), [(0, "missing"), (-1, "taken_over")])
def test_the_answer_that_the_lease_is_not_ours_ends_trust_at_once(stage: Stage, answer: int, reason: str) -> None:
    talk, trust = beating(stage)
    told: list[LeaseLost] = []
    trust.on_loss(told.append)
    stage.clock.advance(10)
    talk.answer(GO_ON)
    talk.answer(answer)
    assert talk.ended
    assert [lost.reason for lost in told] == [reason]


def test_an_error_is_not_an_answer_the_question_is_asked_again_soon(stage: Stage) -> None:
    talk, trust = beating(stage)
    stage.clock.advance(10)
    talk.answer(GO_ON)
    stage.clock.advance(3)
    assert talk.fail(NO_ANSWER) == Pause(1)
    stage.clock.advance(1)
    step = talk.answer(GO_ON)
    assert step.within == pytest.approx(27 - 14)
    talk.answer(1)
    assert trust.lost is None
    assert trust.grant.trusted_until == 1014 + 27
    assert stage.events == [Renewed(RESOURCE, 7, gap=14.0)]


def test_with_a_short_ttl_the_next_attempt_comes_sooner() -> None:
    stage = Stage(ttl=1.2)
    talk, _ = beating(stage)
    stage.clock.advance(0.4)
    talk.answer(GO_ON)
    assert talk.fail(NO_ANSWER).seconds == pytest.approx(0.1)


def test_when_renewals_go_on_failing_the_loss_is_told_as_trust_ends_and_not_later(stage: Stage) -> None:
    talk, trust = beating(stage)
    told: list[tuple[float, str]] = []
    trust.on_loss(lambda lost: told.append((stage.clock.now, lost.reason)))
    while not talk.ended:
        if isinstance(talk.step, Pause):
            stage.clock.advance(talk.step.seconds)
            talk.answer(GO_ON)
        else:
            stage.clock.advance(min(4.0, talk.step.within))
            talk.fail(NO_ANSWER)
    assert told == [(1027.0, "store_unreachable")]


def test_a_process_that_slept_through_its_trust_asks_nothing_on_waking(stage: Stage) -> None:
    talk, trust = beating(stage)
    stage.clock.advance(3600)
    talk.answer(GO_ON)
    assert talk.ended
    assert trust.lost is not None
    assert trust.lost.reason == "suspended"


def test_a_renewal_that_succeeds_after_trust_has_ended_takes_nothing_back(stage: Stage) -> None:
    talk, trust = beating(stage)
    stage.clock.advance(10)
    talk.answer(GO_ON)
    stage.clock.advance(17)
    talk.answer(1)
    assert talk.ended
    assert trust.lost is not None
    assert stage.events == []


def test_a_heartbeat_that_wakes_early_asks_nothing_before_its_time(stage: Stage) -> None:
    talk, _ = beating(stage)
    stage.clock.advance(9)
    assert talk.answer(GO_ON) == Pause(1)


def test_a_lift_moves_the_end_of_trust_and_the_heartbeat_goes_on(stage: Stage) -> None:
    talk, trust = beating(stage)
    stage.clock.advance(10)
    talk.answer(GO_ON)
    stage.clock.advance(16.5)
    assert talk.fail(NO_ANSWER) == Pause(0.5)  # all that is left of trust
    trust.lifted(stage.grant(token=8))
    stage.clock.advance(0.5)
    assert talk.answer(GO_ON) == Pause(0.5)
    stage.clock.advance(0.5)
    talk.answer(GO_ON)
    talk.answer(1)
    assert stage.events == [Renewed(RESOURCE, 8, gap=1.0)]


def test_after_max_hold_the_lease_is_lost_and_no_longer_renewed(stage: Stage) -> None:
    talk, trust = beating(stage, max_hold=12.0)
    stage.clock.advance(10)
    assert talk.answer(GO_ON).within == pytest.approx(2)
    assert talk.answer(1) == Pause(2)
    stage.clock.advance(2)
    talk.answer(GO_ON)
    assert talk.ended
    assert trust.lost is not None
    assert trust.lost.reason == "max_hold"


def test_a_heartbeat_begun_late_renews_at_once(stage: Stage) -> None:
    trust = Trust(stage.grant(), timing=stage.timing, clock=stage.clock)
    stage.clock.advance(15)
    talk = Talk(protocol.heartbeat(stage.terms, trust))
    assert talk.step == Pause(0)
    assert talk.answer(GO_ON).script is RENEW


def test_a_listener_that_fails_costs_no_lease(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Event) -> None:
        raise RuntimeError("a bug in the listener")

    stage.terms = replace(stage.terms, listener=fail)
    talk = taking(stage)
    talk.answer([b"granted", b"7"])
    assert talk.result.token == 7
    assert "the listener failed" in caplog.text


# -- the drivers


def asks(question: str = "?") -> Flow[str]:
    """Ask, ask again after an error, and return what came of it."""
    try:
        answer = yield question
    except (KeyError, Interrupted) as error:
        answer = yield type(error).__name__
    return f"got {answer}"


def performing(*answers: object) -> tuple[Callable[[Any], object], list[Any]]:
    steps: list[Any] = []
    left = iter(answers)

    def perform(step: Any) -> object:
        steps.append(step)
        answer = next(left)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return perform, steps


def drive_sync(flow: Generator[Any, Any, Any], perform: Callable[[Any], object]) -> Any:
    return run(flow, perform)


def drive_async(flow: Generator[Any, Any, Any], perform: Callable[[Any], object]) -> Any:
    async def performed(step: Any) -> object:
        return perform(step)

    coroutine = arun(flow, performed)
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("waited although nothing was to be waited for")


drivers = pytest.mark.parametrize("drive", [drive_sync, drive_async])


@drivers
def test_a_driver_sends_answers_and_returns_the_flows_result(drive: Callable[..., Any]) -> None:
    perform, steps = performing("!")
    assert drive(asks(), perform) == "got !"
    assert steps == ["?"]


@drivers
@pytest.mark.parametrize("error", [KeyError("no"), Interrupted()])
def test_a_driver_throws_the_error_of_a_step_into_the_flow(drive: Callable[..., Any], error: BaseException) -> None:
    perform, steps = performing(error, "!")
    assert drive(asks(), perform) == "got !"
    assert steps == ["?", type(error).__name__]


@drivers
def test_an_error_that_the_flow_does_not_want_leaves_the_driver(drive: Callable[..., Any]) -> None:
    perform, _ = performing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        drive(asks(), perform)


@drivers
def test_a_flow_without_steps_is_driven_to_its_result(drive: Callable[..., Any]) -> None:
    def nothing() -> Flow[int]:
        return 3
        yield

    perform, steps = performing()
    assert drive(nothing(), perform) == 3
    assert steps == []
