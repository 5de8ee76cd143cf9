"""How a granted lease becomes a raised fence, written once for both guards (flows, see `fenceguard._flow`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from fenceguard._flow import Flow, Pause
from fenceguard.errors import StaleToken, StoreUnreachable
from fenceguard.model import Grant

if TYPE_CHECKING:
    from fenceguard.guard.hold import Hold

MAX_REFUSALS: Final = 8
"""A lift puts the token above the fence; to be refused again, somebody must have claimed in between."""

MAX_LOST_REPLIES: Final = 3
"""Claims sent again after a lost reply; a claim that had arrived is recognised as this holder's own."""


@dataclass(frozen=True, slots=True)
class RaiseFence:
    """Step: claim the fence with the grant's token, waiting up to `wait` seconds for open transactions."""

    grant: Grant
    wait: float


@dataclass(frozen=True, slots=True)
class Lift:
    """Step: as owner of the lease, take a token above `above`; answered with the grant that carries it."""

    grant: Grant
    above: int


Step: TypeAlias = RaiseFence | Lift


def claim(grant: Grant, *, give_up_at: float, clock: Callable[[], float]) -> Flow[Grant]:
    """Raise the fence to the grant's token, lifting Redis' counter where it stands below the fence.

    Returns the grant under which the fence was claimed: the same one, or one with a newer token.

    Raises:
        LeaseLost: the fence is above the token and Redis no longer names this owner.
        ClaimTimeout: open transactions kept the claim waiting until `give_up_at`, an instant of `clock`.
        StaleToken: refused `MAX_REFUSALS` times in a row.
        StoreUnreachable: Postgres or Redis gave no usable answer.
    """
    refusals = lost_replies = 0
    while True:
        try:
            yield RaiseFence(grant, max(0.0, give_up_at - clock()))
        except StaleToken as refused:
            refusals += 1
            if refusals == MAX_REFUSALS:
                raise
            above = refused.newest
        except StoreUnreachable:
            lost_replies += 1
            if lost_replies == MAX_LOST_REPLIES or clock() >= give_up_at:
                raise
            continue
        else:
            return grant
        grant = yield Lift(grant, above)


def reclaim(grant: Grant, *, above: int, give_up_at: float, clock: Callable[[], float]) -> Flow[Grant]:
    """Claim anew after Postgres refused a write: above the token that pushed this holder out, as owner.

    The token that pushed it out may be a dead holder's, claimed late; Redis decides who is the holder.
    Returns and raises as `claim` does.
    """
    lifted = yield Lift(grant, above)
    return (yield from claim(lifted, give_up_at=give_up_at, clock=clock))


def outlive(hold: Hold, *, clock: Callable[[], float]) -> Flow[bool]:
    """Wait until the transactions that a hold is kept for have ended, or the hold has, or its time is over.

    `Pause` is to be cut short when a transaction ends. Returns whether one is open still.
    """
    while hold.transactions and not hold.ended:
        left = hold.kept_until() - clock()
        if left <= 0:
            return True
        yield Pause(left)
    return False
