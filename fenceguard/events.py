"""What happened, as values: the guard hands each event to its listener; `log` is the default one.

Durations are seconds. An event names the resource, never the data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar, TypeAlias

from fenceguard.errors import LostReason

_logger = logging.getLogger("fenceguard")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a resource's lease or fence under `token`."""

    resource: str
    token: int

    level: ClassVar[int] = logging.DEBUG


@dataclass(frozen=True, slots=True)
class Acquired(Event):
    """The lease was granted after `waited`."""

    waited: float


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """The lease was renewed, `gap` after the renewal or grant before."""

    gap: float


@dataclass(frozen=True, slots=True)
class Lost(Event):
    """Trust in the lease ended before its hold did."""

    reason: LostReason

    level: ClassVar[int] = logging.ERROR


@dataclass(frozen=True, slots=True)
class Claimed(Event):
    """The fence was raised to the token after `waited`."""

    waited: float


@dataclass(frozen=True, slots=True)
class Lifted(Event):
    """The owner of the lease was given `token`, which is above the fence, in place of its token `refused`.

    Postgres had refused that one: the counter in Redis had begun again below the fence, or an earlier holder had
    claimed late.
    """

    refused: int

    level: ClassVar[int] = logging.WARNING


@dataclass(frozen=True, slots=True)
class Refused(Event):
    """Postgres refused a write under the token; `newest` has claimed the resource since."""

    newest: int
    table: str | None

    level: ClassVar[int] = logging.ERROR


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The lease was given back after `held`."""

    held: float


@dataclass(frozen=True, slots=True)
class ExpiredLate(Event):
    """Trust ended after the last commit of the work, whose result therefore stands."""

    late: float

    level: ClassVar[int] = logging.WARNING


@dataclass(frozen=True, slots=True)
class Outlived(Event):
    """A transaction that wrote under a hold was still open `bound` after it; the lease was given back."""

    bound: float

    level: ClassVar[int] = logging.WARNING


Listener: TypeAlias = Callable[[Event], None]
"""Is handed each event, on the thread it happened on; must neither block nor raise."""


def log(event: Event) -> None:
    """Log `event` on the logger ``fenceguard``, its members in the record's ``fenceguard`` attribute."""
    members = asdict(event)
    text = " ".join(f"{name}={value!r}" for name, value in members.items())
    _logger.log(event.level, "%s %s", type(event).__name__, text, extra={"fenceguard": members})


def tell(listener: Listener, event: Event) -> None:
    """Hand `event` over; a listener that fails is logged, and is no reason to lose a lease."""
    try:
        listener(event)
    except Exception:
        _logger.exception("the listener failed on %r", event)
