"""The claim flow with canned answers and a fake clock; no server."""

from collections.abc import Callable
from typing import Any

import pytest

from fenceguard._flow import Flow, run
from fenceguard.errors import ClaimTimeout, LeaseLost, StaleToken, StoreUnreachable
from fenceguard.guard.protocol import MAX_LOST_REPLIES, MAX_REFUSALS, Lift, RaiseFence, claim, reclaim
from fenceguard.model import Grant

GRANT = Grant("account:42", "a-1", 1, 30.0, 27.0)


class Servers:
    """Answers steps in the order given and keeps them; each answer takes a second."""

    def __init__(self, *answers: object) -> None:
        self.steps: list[RaiseFence | Lift] = []
        self.now = 100.0
        self._answers = list(answers)

    def clock(self) -> float:
        return self.now

    def perform(self, step: RaiseFence | Lift) -> object:
        self.steps.append(step)
        self.now += 1.0
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def refused(newest: int) -> StaleToken:
    return StaleToken("account:42", 1, newest)


def drive(flow: Callable[..., Flow[Grant]], servers: Servers, **options: Any) -> Grant:
    return run(flow(GRANT, give_up_at=110.0, clock=servers.clock, **options), servers.perform)


def lifted(token: int) -> Grant:
    return Grant("account:42", "a-1", token, 30.0, 57.0)


def test_a_claim_that_is_admitted_keeps_the_grant() -> None:
    servers = Servers(None)
    assert drive(claim, servers) is GRANT
    assert servers.steps == [RaiseFence(GRANT, 10.0)]


def test_a_refused_claim_lifts_the_counter_above_the_fence_and_claims_the_new_token() -> None:
    servers = Servers(refused(7), lifted(8), None)
    assert drive(claim, servers).token == 8
    assert servers.steps == [RaiseFence(GRANT, 10.0), Lift(GRANT, 7), RaiseFence(lifted(8), 8.0)]


def test_a_refused_claim_of_one_who_no_longer_owns_the_lease_is_lost() -> None:
    servers = Servers(refused(7), LeaseLost("account:42", "taken_over"))
    with pytest.raises(LeaseLost) as caught:
        drive(claim, servers)
    assert caught.value.reason == "taken_over"


def test_a_claim_is_not_refused_for_ever() -> None:
    answers = [answer for n in range(2, MAX_REFUSALS + 2) for answer in (refused(n), lifted(n + 1))]
    servers = Servers(*answers)
    with pytest.raises(StaleToken) as caught:
        drive(claim, servers)
    assert caught.value.newest == MAX_REFUSALS + 1
    assert sum(isinstance(step, RaiseFence) for step in servers.steps) == MAX_REFUSALS


def test_a_claim_whose_reply_was_lost_is_sent_again_within_the_same_wait() -> None:
    servers = Servers(StoreUnreachable("postgres", "the connection was cut"), None)
    assert drive(claim, servers) is GRANT
    assert servers.steps == [RaiseFence(GRANT, 10.0), RaiseFence(GRANT, 9.0)]


def test_a_claim_gives_up_on_a_server_that_does_not_answer() -> None:
    servers = Servers(*[StoreUnreachable("postgres", "no server")] * MAX_LOST_REPLIES)
    with pytest.raises(StoreUnreachable):
        drive(claim, servers)
    assert len(servers.steps) == MAX_LOST_REPLIES


def test_a_claim_kept_waiting_is_not_repeated() -> None:
    servers = Servers(ClaimTimeout("account:42", 10.0, []))
    with pytest.raises(ClaimTimeout):
        drive(claim, servers)
    assert len(servers.steps) == 1


def test_the_wait_of_a_later_claim_never_goes_below_zero() -> None:
    servers = Servers(refused(7), lifted(8), None)
    run(claim(GRANT, give_up_at=101.5, clock=servers.clock), servers.perform)
    assert servers.steps[-1] == RaiseFence(lifted(8), 0.0)


def test_a_fence_is_claimed_anew_above_the_token_that_pushed_this_owner_out() -> None:
    servers = Servers(lifted(10), None)
    assert drive(reclaim, servers, above=9).token == 10
    assert servers.steps == [Lift(GRANT, 9), RaiseFence(lifted(10), 9.0)]


def test_a_fence_is_not_claimed_anew_by_one_who_lost_the_lease() -> None:
    servers = Servers(LeaseLost("account:42", "missing"))
    with pytest.raises(LeaseLost):
        drive(reclaim, servers, above=9)
    assert servers.steps == [Lift(GRANT, 9)]
