"""Trust and owners, without a server."""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from lease_talk import Stage

from fenceguard.errors import LeaseLost
from fenceguard.lease import trust as trust_module
from fenceguard.lease.identity import Identity
from fenceguard.lease.trust import Trust


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def trust(stage: Stage) -> Trust:
    """Of a grant asked for now: 27 s of a ttl of 30."""
    return Trust(stage.grant(), timing=stage.timing, clock=stage.clock)


def reason(trust: Trust) -> str | None:
    return None if trust.lost is None else trust.lost.reason


def test_trust_lasts_for_ttl_less_safety_and_not_a_moment_longer(stage: Stage, trust: Trust) -> None:
    stage.clock.advance(26.5)
    trust.confirm()
    assert trust.remaining() == 0.5
    stage.clock.advance(0.5)
    with pytest.raises(LeaseLost) as caught:
        trust.confirm()
    assert (caught.value.resource, caught.value.reason) == ("account:42", "suspended")
    stage.clock.advance(2)
    assert trust.remaining() == -2


def test_a_renewal_extends_trust_from_its_question(stage: Stage, trust: Trust) -> None:
    stage.clock.advance(10)
    assert trust.extend(stage.clock.now - 1)
    assert trust.remaining() == 26


def test_a_renewal_asked_for_earlier_and_answered_later_shortens_nothing(stage: Stage, trust: Trust) -> None:
    stage.clock.advance(10)
    trust.extend(stage.clock.now)
    trust.extend(stage.clock.now - 5)
    assert trust.remaining() == 27


def test_trust_that_ended_unseen_is_not_revived_by_a_renewal(stage: Stage, trust: Trust) -> None:
    stage.clock.advance(27)
    assert not trust.extend(stage.clock.now)
    assert reason(trust) == "suspended"
    assert trust.remaining() == 0


def test_a_store_that_did_not_answer_in_time_is_the_reason(stage: Stage, trust: Trust) -> None:
    trust.asking()
    stage.clock.advance(27)
    assert reason(trust) == "store_unreachable"


def test_a_process_that_slept_after_its_last_answer_is_the_reason(stage: Stage, trust: Trust) -> None:
    trust.asking()
    trust.extend(stage.clock.now)
    stage.clock.advance(27)
    assert reason(trust) == "suspended"


def test_the_first_reason_stands(stage: Stage, trust: Trust) -> None:
    trust.lose("taken_over")
    trust.lose("missing")
    stage.clock.advance(100)
    trust.end()
    assert reason(trust) == "taken_over"
    assert trust.remaining() == -100


def test_a_loss_that_time_had_brought_before_is_not_explained_otherwise(stage: Stage, trust: Trust) -> None:
    stage.clock.advance(27)
    trust.lose("taken_over")
    assert reason(trust) == "suspended"


def test_everybody_is_told_once_whenever_they_asked(stage: Stage, trust: Trust) -> None:
    told: list[str] = []
    trust.on_loss(lambda lost: told.append(f"before: {lost.reason}"))
    trust.lose("missing")
    trust.on_loss(lambda lost: told.append(f"after: {lost.reason}"))
    stage.clock.advance(100)
    for _ in range(2):
        with pytest.raises(LeaseLost):
            trust.confirm()
    assert told == ["before: missing", "after: missing"]


@pytest.mark.parametrize("notice", ["lost", "extend", "end"])
def test_who_notices_that_time_has_run_out_tells_the_others(stage: Stage, trust: Trust, notice: str) -> None:
    told: list[str] = []
    trust.on_loss(lambda lost: told.append(lost.reason))
    stage.clock.advance(27)
    {"lost": lambda: trust.lost, "extend": lambda: trust.extend(0.0), "end": trust.end}[notice]()
    assert told == ["suspended"]


def test_who_asks_to_be_told_when_time_has_run_out_is_told_at_once(stage: Stage, trust: Trust) -> None:
    told: list[str] = []
    stage.clock.advance(27)
    trust.on_loss(lambda lost: told.append(lost.reason))
    assert told == ["suspended"]


def test_a_callback_that_fails_keeps_nobody_from_being_told(trust: Trust, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def fail(_: LeaseLost) -> None:
        raise RuntimeError("a bug in a callback")

    trust.on_loss(fail)
    trust.on_loss(lambda lost: told.append(lost.reason))
    trust.lose("missing")
    assert told == ["missing"]
    assert "a bug in a callback" in caplog.text


def test_a_callback_may_ask_and_add_callbacks(trust: Trust) -> None:
    told: list[str] = []

    def nested(lost: LeaseLost) -> None:
        trust.on_loss(lambda again: told.append(f"{lost.reason} {again.reason} {trust.remaining() <= 0}"))

    trust.on_loss(nested)
    trust.lose("missing")
    assert told == ["missing missing True"]


def test_the_end_of_the_heartbeat_is_no_loss_that_anybody_is_told(trust: Trust) -> None:
    told: list[LeaseLost] = []
    trust.on_loss(told.append)
    trust.end()
    trust.on_loss(told.append)
    assert reason(trust) == "released"
    assert told == []


def test_threads_that_notice_at_the_same_time_tell_once(stage: Stage) -> None:
    def look(trust: Trust, together: threading.Barrier) -> None:
        together.wait(10)
        assert trust.lost is not None

    together = threading.Barrier(4)
    for _ in range(50):
        trust = Trust(stage.grant(), timing=stage.timing, clock=stage.clock)
        told: list[LeaseLost] = []
        trust.on_loss(told.append)
        stage.clock.advance(27)
        threads = [threading.Thread(target=look, args=(trust, together)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(told) == 1


def test_max_hold_ends_trust_however_often_it_is_renewed(stage: Stage) -> None:
    trust = Trust(stage.grant(), timing=stage.timing, clock=stage.clock, max_hold=20)
    stage.clock.advance(10)
    trust.extend(stage.clock.now)
    assert trust.remaining() == 10
    stage.clock.advance(10)
    assert not trust.extend(stage.clock.now)
    assert reason(trust) == "max_hold"


@pytest.mark.parametrize("max_hold", [0, -1, math.nan])
def test_a_max_hold_that_is_no_duration_is_refused(stage: Stage, max_hold: float) -> None:
    with pytest.raises(ValueError, match="max_hold must be"):
        Trust(stage.grant(), timing=stage.timing, clock=stage.clock, max_hold=max_hold)


def test_a_lift_changes_the_token_and_extends_trust(stage: Stage, trust: Trust) -> None:
    stage.clock.advance(5)
    trust.lifted(stage.grant(token=8))
    assert (trust.grant.token, trust.remaining()) == (8, 27)
    trust.lifted(replace(stage.grant(token=7), trusted_until=0.0))  # an older answer
    assert (trust.grant.token, trust.remaining()) == (8, 27)


def test_a_lift_does_not_revive_trust(stage: Stage, trust: Trust) -> None:
    trust.lose("taken_over")
    trust.lifted(stage.grant(token=8))
    assert trust.grant.token == 7
    assert reason(trust) == "taken_over"


def test_another_lease_is_no_lift(stage: Stage, trust: Trust) -> None:
    with pytest.raises(ValueError, match="is not the lease that is held"):
        trust.lifted(stage.grant(owner="somebody else"))


def test_a_pickled_grant_carries_no_trust(stage: Stage) -> None:
    trust = Trust(pickle.loads(pickle.dumps(stage.grant())), timing=stage.timing, clock=stage.clock)
    assert trust.remaining() == -math.inf
    assert reason(trust) == "suspended"


def test_the_causes_of_a_failure_are_kept(trust: Trust) -> None:
    bug = ZeroDivisionError()
    trust.lose("store_unreachable", cause=bug)
    with pytest.raises(LeaseLost) as caught:
        trust.confirm()
    assert caught.value.__cause__ is bug


def test_the_clock_goes_on_while_the_machine_sleeps_where_it_can() -> None:
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    expected = time.monotonic() if boot is None else time.clock_gettime(boot)
    assert trust_module.clock() == pytest.approx(expected, abs=1.0)


# -- forks


def in_child(act: Callable[[], Any]) -> str:
    """Return what `act` comes to in a forked child, as text."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writes, repr(act()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as end:
        said = end.read().decode()
    os.waitpid(child, 0)
    return said


def test_a_forked_child_trusts_nothing_and_tells_nobody(trust: Trust) -> None:
    told: list[LeaseLost] = []
    trust.on_loss(told.append)

    def look() -> tuple[Any, ...]:
        trust.lose("missing")
        trust.on_loss(told.append)
        trust.end()
        return trust.remaining(), reason(trust), len(told)

    assert in_child(look) == "(-inf, 'forked', 0)"
    assert reason(trust) is None


def test_a_child_forked_while_another_thread_was_asking_does_not_hang(trust: Trust) -> None:
    with trust._lock:
        assert in_child(lambda: (trust.remaining(), reason(trust))) == "(-inf, 'forked')"


def test_a_child_knows_its_parents_grants_from_its_own(stage: Stage) -> None:
    identity = Identity("label")
    parents = stage.grant(owner=identity.new())
    elsewhere = stage.grant(owner=Identity("label").new())  # handed over on purpose

    def look() -> list[bool]:
        own = stage.grant(owner=identity.new())
        return [identity.inherited(grant) for grant in (parents, own, elsewhere)]

    assert in_child(look) == "[True, False, False]"
    assert not identity.inherited(parents)


def test_a_grandchild_knows_them_as_well(stage: Stage) -> None:
    identity = Identity(None)
    first = stage.grant(owner=identity.new())

    def look() -> str:
        second = stage.grant(owner=identity.new())
        return in_child(lambda: [identity.inherited(grant) for grant in (first, second)])

    assert in_child(look) == repr("[True, True]")


def test_an_owner_names_host_and_process_unless_a_label_is_given() -> None:
    assert f":{os.getpid()}-" in Identity(None).new()
    assert Identity("a label").new().startswith("a label-")


@pytest.mark.parametrize("label", ["a\nb", "\x00", "x" * 500])
def test_a_label_that_makes_no_owner_is_refused_at_once(label: str) -> None:
    with pytest.raises(ValueError, match="owner"):
        Identity(label)
