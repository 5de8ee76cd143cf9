"""Values are checked once, when they are made."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenceguard.model import MAX_TOKEN, MIN_TTL, Claim, Grant, Lease, Timing, check_token

# -- tokens


@pytest.mark.parametrize("token", [1, 7, MAX_TOKEN])
def test_a_token_is_an_integer_that_redis_counts_exactly(token: int) -> None:
    assert check_token(token) == token
    assert float(token) == token


@pytest.mark.parametrize("token", [0, -1, MAX_TOKEN + 1])
def test_a_token_out_of_range_is_a_value_error(token: int) -> None:
    with pytest.raises(ValueError, match=r"between 1 and 9007199254740991 \(2\*\*53 - 1\), not"):
        check_token(token)


@pytest.mark.parametrize("token", [True, 1.0, "1", None])
def test_a_token_that_is_no_integer_is_a_type_error(token: Any) -> None:
    with pytest.raises(TypeError, match="token must be an int, not"):
        check_token(token)


@pytest.mark.parametrize("make", [Claim, lambda *fields: Grant(*_grant(*fields))])
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (("", 1, "owner"), ValueError),
        (("a\nb", 1, "owner"), ValueError),
        (("resource", 0, "owner"), ValueError),
        (("resource", True, "owner"), TypeError),
        (("resource", 1, ""), ValueError),
        (("resource", 1, None), TypeError),
    ],
)
def test_a_claim_or_grant_that_the_servers_would_refuse_cannot_be_made(
    make: Any, fields: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        make(*fields)


def _grant(resource: str, token: int, owner: str) -> tuple[str, str, int, float, float]:
    return resource, owner, token, 30.0, 1.0


@pytest.mark.parametrize("value", [Claim("r", 1, "o"), Grant("r", "o", 1, 30.0, 5.0), Lease("r", "o", 1, 3.0)])
def test_values_are_frozen(value: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        value.token = 2


def test_claims_and_leases_pickle_as_they_are() -> None:
    for value in (Claim("r", 7, "o"), Lease("r", "o", 7, 1.5)):
        assert pickle.loads(pickle.dumps(value)) == value


def test_a_pickled_grant_carries_no_trust() -> None:
    grant = Grant("r", "o", 7, 30.0, trusted_until=1e9)
    arrived = pickle.loads(pickle.dumps(grant))
    assert (arrived.resource, arrived.owner, arrived.token, arrived.ttl) == ("r", "o", 7, 30.0)
    assert arrived.trusted_until == copy.copy(grant).trusted_until == -math.inf


def test_grants_are_equal_whatever_the_moment_of_their_trust() -> None:
    one, other = (Grant("r", "o", 7, 30.0, trusted_until=moment) for moment in (1.0, 2.0))
    assert one == other
    assert len({one, other}) == 1


# -- timings


@pytest.mark.parametrize(("ttl", "budget"), [(1.5, 0.85), (10.0, 17 / 3), (30.0, 17.0)])
def test_a_timing_s_defaults_leave_the_stall_budget_of_the_design(ttl: float, budget: float) -> None:
    timing = Timing.of(ttl)
    assert (timing.renew_every, timing.safety) == (ttl / 3, ttl / 10)
    assert timing.stall_budget == pytest.approx(budget)


def test_what_is_said_of_a_timing_replaces_its_default() -> None:
    timing = Timing.of(30.0, renew_every=2.0, safety=1.0)
    assert (timing.renew_every, timing.safety, timing.stall_budget) == (2.0, 1.0, 27.0)


def test_decimal_fractions_may_stand_at_the_very_bound() -> None:
    assert Timing(0.3, 0.1, 0.1).renew_every == 0.1


@pytest.mark.parametrize(
    ("ttl", "why"),
    [
        (MIN_TTL / 2, "at least 0.1, not 0.05"),
        (0.0, "ttl"),
        (-1.0, "ttl"),
        (math.inf, "finite"),
        (math.nan, "finite"),
    ],
)
def test_a_ttl_too_short_or_endless_is_refused(ttl: float, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Timing.of(ttl)


@pytest.mark.case(
    "case 20: renewal interval nearly as long as the ttl", control="none: such a lease cannot be made"
)
@pytest.mark.parametrize("renew_every", [29.0, 10.1, 0.0, -1.0, math.inf, math.nan])
def test_case_20_a_renewal_interval_nearly_as_long_as_the_ttl_is_refused_with_the_rule(renew_every: float) -> None:
    with pytest.raises(ValueError, match=r"renew_every must be above 0 and at most ttl/3 \(10 s for ttl=30\), not"):
        Timing.of(30.0, renew_every=renew_every)


@pytest.mark.parametrize("safety", [0.0, -1.0, 20.0, 25.0, math.inf, math.nan])
def test_a_safety_that_leaves_no_trust_is_refused_with_the_rule(safety: float) -> None:
    with pytest.raises(ValueError, match=r"safety must be above 0 and below ttl - renew_every \(20 s\), not"):
        Timing.of(30.0, safety=safety)


def test_the_shortest_lease_has_a_timing() -> None:
    assert Timing.of(MIN_TTL).ttl_ms == 100


@given(st.floats(MIN_TTL, 1e6))
def test_redis_keeps_a_lease_at_least_as_long_as_its_holder_counts_on(ttl: float) -> None:
    assert ttl * 1000 <= Timing.of(ttl).ttl_ms < ttl * 1000 + 1
