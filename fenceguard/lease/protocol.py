"""The lease protocol: what is asked of Redis, when, and what an answer means, as flows (see `fenceguard._flow`).

It knows no clock, thread or connection: `Terms.clock` is read before each question, because trust begins there.
Of an attempt's failure only `StoreUnreachable` is known here, which says nothing about what Redis has done.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from fenceguard._flow import Flow, Pause
from fenceguard.errors import LeaseLost, LeaseUnavailable, StoreUnreachable
from fenceguard.events import Acquired, Lifted, Listener, Released, Renewed, tell
from fenceguard.lease.scripts import Call, Keys
from fenceguard.lease.trust import Clock, Trust
from fenceguard.model import MAX_TOKEN, Grant, Lease, Timing, check_seconds, check_token

ATTEMPTS: Final = 3
"""How often a question is asked before its want of an answer is reported."""

ATTEMPT_PAUSE: Final = 0.05
"""Seconds between two attempts of a question."""

POLL: Final = 0.05
"""Seconds between two looks at a lease that is waited for, at most; at least half of it."""

RENEW_PAUSE: Final = 1.0
"""Seconds between two attempts of a renewal, at most; a quarter of `renew_every` where that is less."""

Jitter: TypeAlias = Callable[[], float]
"""A random number from 0 to 1, so that those who wait do not all ask at once."""

_logger = logging.getLogger("fenceguard")


class UnknownScript(Exception):
    """Redis does not know the script by name: it was restarted or its scripts were flushed."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the flows of one client share."""

    keys: Keys
    timing: Timing
    clock: Clock
    listener: Listener


@dataclass(frozen=True, slots=True)
class Settle:
    """Step: drive this flow to its end, though the caller is cancelled meanwhile; answered with its result."""

    flow: Flow[Any]


def ask(call: Call) -> Flow[Any]:
    """Run a script by its name, and by its text where Redis has forgotten it."""
    try:
        return (yield call)
    except UnknownScript:
        return (yield call.in_full())


def insist(terms: Terms, call: Call) -> Flow[tuple[float, Any]]:
    """Ask until there is an answer, a few times; return when the answered question was asked, and the answer.

    Raises:
        StoreUnreachable: the last attempt had none, or `renew_every` has gone by.
    """
    give_up_at = terms.clock() + terms.timing.renew_every
    attempt = 1
    while True:
        asked_at = terms.clock()
        try:
            return asked_at, (yield from ask(call))
        except StoreUnreachable:
            if attempt == ATTEMPTS or terms.clock() >= give_up_at:
                raise
        attempt += 1
        yield Pause(ATTEMPT_PAUSE)


def try_acquire(terms: Terms, resource: str, owner: str) -> Flow[Grant | None]:
    """Take the lease for `owner` if it is free; `None` when somebody else holds it."""
    got = yield from _acquire(terms, resource, owner, wait=0.0, jitter=lambda: 1.0)
    return got if isinstance(got, Grant) else None


def acquire(terms: Terms, resource: str, owner: str, *, wait: float, jitter: Jitter) -> Flow[Grant]:
    """Take the lease for `owner`, waiting at most `wait` seconds for it.

    Raises:
        LeaseUnavailable: somebody else holds it still.
        StoreUnreachable: no attempt was answered in time to be of use.
        ValueError: `wait` is negative, infinite or not a number.
    """
    check_seconds("wait", wait)
    got = yield from _acquire(terms, resource, owner, wait=wait, jitter=jitter)
    if isinstance(got, Grant):
        return got
    raise LeaseUnavailable(resource, got.owner, got.remaining)


def _acquire(terms: Terms, resource: str, owner: str, *, wait: float, jitter: Jitter) -> Flow[Grant | Lease]:
    began = terms.clock()
    call = terms.keys.acquire(resource, owner, terms.timing)
    try:
        while True:
            got = yield from _take(terms, call, resource, owner)
            left = began + wait - terms.clock()
            if isinstance(got, Grant) or left <= 0:
                break
            yield Pause(min(POLL * (1 + jitter()) / 2, left, max(got.remaining, ATTEMPT_PAUSE / 10)))
    except GeneratorExit:  # nobody is there to perform a step
        raise
    except BaseException:
        # Given up, perhaps with a question under way: what it may have got ends now and not a ttl later.
        yield Settle(_give_back(terms, resource, owner))
        raise
    if isinstance(got, Grant):
        tell(terms.listener, Acquired(resource, got.token, waited=terms.clock() - began))
    return got


def _take(terms: Terms, call: Call, resource: str, owner: str) -> Flow[Grant | Lease]:
    """Ask for the lease once; return the grant, or whose it is."""
    for _ in range(ATTEMPTS):
        asked_at, answer = yield from insist(terms, call)
        if _text(answer[0]) != "granted":
            return _lease(resource, answer)
        grant = Grant(resource, owner, int(answer[1]), terms.timing.ttl, asked_at + terms.timing.trust_lasts)
        # Asked again when the answer took so long that trust has ended: the grant is recognised, its ttl renewed.
        if terms.clock() < grant.trusted_until:
            return grant
    timing = terms.timing
    raise StoreUnreachable(
        "redis",
        f"each answer took longer than the {timing.trust_lasts:g} s for which a lease of {timing.ttl:g} s can be "
        "trusted; use a longer ttl",
    )


def _give_back(terms: Terms, resource: str, owner: str) -> Flow[None]:
    try:
        yield from insist(terms, terms.keys.release(resource, owner))
    except StoreUnreachable as error:
        _logger.debug("what may have been acquired on %r ends with its ttl: %s", resource, error)


def renew(terms: Terms, grant: Grant) -> Flow[Grant]:
    """Renew the lease once.

    Raises:
        LeaseLost: it is gone or somebody else's, or the answer came when trust in it had ended.
        StoreUnreachable: not known.
    """
    asked_at, answer = yield from insist(terms, terms.keys.renew(grant.resource, grant.owner, terms.timing))
    lost = _denied(answer)
    if lost is not None:
        raise LeaseLost(grant.resource, lost)
    return _trusted(terms, replace(grant, ttl=terms.timing.ttl, trusted_until=asked_at + terms.timing.trust_lasts))


def release(terms: Terms, grant: Grant) -> Flow[bool]:
    """Give the lease back; return whether it is known to have been ours until now."""
    given_back: bool = yield Settle(_release(terms, grant))
    return given_back


def _release(terms: Terms, grant: Grant) -> Flow[bool]:
    try:
        _, answer = yield from insist(terms, terms.keys.release(grant.resource, grant.owner))
    except StoreUnreachable as error:
        _logger.warning("the lease on %r was not given back and ends with its ttl: %s", grant.resource, error)
        return False
    if answer == 1:
        held = terms.clock() - (grant.trusted_until - terms.timing.trust_lasts)
        tell(terms.listener, Released(grant.resource, grant.token, held=held))
    return bool(answer == 1)


def inspect(terms: Terms, resource: str) -> Flow[Lease | None]:
    """Return who holds the lease; `None` when nobody does."""
    _, answer = yield from insist(terms, terms.keys.inspect(resource))
    return None if _text(answer[0]) == "free" else _lease(resource, answer)


def lift(terms: Terms, grant: Grant, *, above: int) -> Flow[Grant]:
    """As owner, take a token larger than `above`; the ttl is refreshed.

    An attempt whose answer was lost costs a token, which nobody else will get.

    Raises:
        LeaseLost: the lease is gone or somebody else's, or trust in it has ended.
        StoreUnreachable: not known.
    """
    call = terms.keys.lift(grant.resource, grant.owner, terms.timing, above=check_token(above))
    asked_at, answer = yield from insist(terms, call)
    match _text(answer[0]):
        case "missing" | "taken_over" as reason:
            raise LeaseLost(grant.resource, reason)
        case "lifted":
            token, until = int(answer[1]), asked_at + terms.timing.trust_lasts
        case _:
            raise _unusable(answer)
    tell(terms.listener, Lifted(grant.resource, token, refused=grant.token))
    return _trusted(terms, replace(grant, token=token, ttl=terms.timing.ttl, trusted_until=until))


def heartbeat(terms: Terms, trust: Trust) -> Flow[None]:
    """Renew the lease until told to end, or until trust has ended; the latter `trust` is told in time.

    An answer that the lease is not ours ends trust. The want of an answer does not; the question is asked again.
    """
    due: float | None = trust.grant.trusted_until - terms.timing.trust_lasts + terms.timing.renew_every
    while due is not None:
        # Not past the end of trust, which has to be noticed when nobody else looks.
        if (yield Pause(max(0.0, min(due - terms.clock(), trust.remaining())))) or trust.lost is not None:
            return
        if terms.clock() >= due:
            due = yield from _renew_once(terms, trust)


def _renew_once(terms: Terms, trust: Trust) -> Flow[float | None]:
    """Renew the lease; return when to do so next, `None` when trust has ended."""
    grant, asked_at = trust.grant, terms.clock()
    trust.asking()
    call = terms.keys.renew(grant.resource, grant.owner, terms.timing, within=trust.remaining())
    try:
        lost = _denied((yield from ask(call)))
    except StoreUnreachable:
        return terms.clock() + min(RENEW_PAUSE, terms.timing.renew_every / 4)
    if lost is not None:
        trust.lose(lost)
        return None
    if not trust.extend(asked_at):
        return None
    tell(
        terms.listener,
        Renewed(grant.resource, grant.token, gap=asked_at - (grant.trusted_until - terms.timing.trust_lasts)),
    )
    return asked_at + terms.timing.renew_every


def _denied(answer: int) -> Literal["missing", "taken_over"] | None:
    """Tell why a renewal was refused."""
    if answer == 1:
        return None
    return "missing" if answer == 0 else "taken_over"


def _trusted(terms: Terms, grant: Grant) -> Grant:
    """Return the grant, unless the answer took longer than trust in it lasts."""
    if terms.clock() >= grant.trusted_until:
        raise LeaseLost(grant.resource, "suspended")
    return grant


def _lease(resource: str, answer: list[Any]) -> Lease:
    if _text(answer[0]) != "held":
        raise _unusable(answer)
    ms = int(answer[3])
    return Lease(resource, _text(answer[2]), int(answer[1]), math.inf if ms < 0 else ms / 1000)


def _unusable(answer: list[Any]) -> StoreUnreachable:
    key = _text(answer[1])
    if _text(answer[0]) == "exhausted":
        problem = (
            f"the counter {key!r} has given out its last token, {MAX_TOKEN}; use another name for the resource"
        )
    else:
        problem = f"the value of key {key!r} is not fenceguard's; delete it or use another prefix"
    return StoreUnreachable("redis", problem)


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
