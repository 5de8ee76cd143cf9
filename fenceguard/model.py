"""The values that the rooms exchange; each is frozen and checked once, when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from fenceguard.resources import check_owner, check_resource

MAX_TOKEN: Final = 2**53 - 1
"""The largest token: Redis' Lua counts in doubles, which hold every integer up to here."""

MIN_TTL: Final = 0.1
"""Seconds. Below it a lease ends within the noise of one network round trip."""

Level: TypeAlias = Literal["reject", "enforce"]
"""What Postgres refuses on a fenced table: stale writes, or unannounced ones too."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)


def check_token(token: int) -> int:
    """Return `token` when it is a fencing token, 1 … `MAX_TOKEN`.

    Raises:
        TypeError: it is no `int` (a `bool` is none).
        ValueError: it is out of range.
    """
    if not isinstance(token, int) or isinstance(token, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"token must be an int, not {token!r}")
    if not 1 <= token <= MAX_TOKEN:
        raise ValueError(f"token must lie between 1 and {MAX_TOKEN} (2**53 - 1), not {token}")
    return token


def check_seconds(name: str, seconds: float, *, least: float = 0.0) -> float:
    """Return `seconds` when it is a finite number of seconds, at least `least`.

    Raises:
        TypeError: it is no number.
        ValueError: it is less, infinite or not a number.
    """
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} must be a number of seconds, not {seconds!r}")
    if not (math.isfinite(seconds) and seconds >= least):
        raise ValueError(f"{name} must be a finite number of seconds, at least {least:g}, not {seconds!r}")
    return seconds


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a lease lives and when it is renewed; all in seconds.

    Attributes:
        ttl: life of the lease in Redis after each renewal, at least `MIN_TTL`.
        renew_every: time between two renewals, at most ttl/3, so that two of them may fail.
        safety: how long before the lease can end its holder stops trusting it; covers the drift between the
            two machines' clocks within one ttl.

    Raises:
        ValueError: a rule above is broken; the message states it.
    """

    ttl: float
    renew_every: float
    safety: float

    @classmethod
    def of(cls, ttl: float, *, renew_every: float | None = None, safety: float | None = None) -> Timing:
        """Make a timing with the defaults ttl/3 and ttl/10 for what is not said."""
        return cls(
            ttl,
            ttl / 3 if renew_every is None else renew_every,
            ttl / 10 if safety is None else safety,
        )

    def __post_init__(self) -> None:
        """Refuse a timing under which a holder could outlive its lease or lose it to one late renewal."""
        check_seconds("ttl", self.ttl, least=MIN_TTL)
        # The tolerance lets `renew_every=0.1` stand beside `ttl=0.3`.
        if not 0 < self.renew_every <= self.ttl / 3 * (1 + 1e-9):
            raise ValueError(
                f"renew_every must be above 0 and at most ttl/3 ({self.ttl / 3:g} s for ttl={self.ttl:g}), "
                f"not {self.renew_every:g}: two renewals may fail before the lease ends"
            )
        if not 0 < self.safety < self.ttl - self.renew_every:
            raise ValueError(
                f"safety must be above 0 and below ttl - renew_every ({self.ttl - self.renew_every:g} s), "
                f"not {self.safety:g}: trust would end before the first renewal"
            )

    @property
    def stall_budget(self) -> float:
        """The longest stall, in seconds, that a lease survives: ttl - renew_every - safety."""
        return self.ttl - self.renew_every - self.safety

    @property
    def trust_lasts(self) -> float:
        """Seconds that a grant is trusted, counted from when it was asked for: ttl - safety."""
        return self.ttl - self.safety

    @property
    def ttl_ms(self) -> int:
        """The ttl in whole milliseconds, as Redis takes it."""
        return math.ceil(self.ttl * 1000)


@dataclass(frozen=True, slots=True)
class Claim:
    """A fence raised in Postgres: whoever writes under it carries `token` and `owner`."""

    resource: str
    token: int
    owner: str

    def __post_init__(self) -> None:
        """Refuse names and tokens that the database would refuse."""
        check_resource(self.resource)
        check_token(self.token)
        check_owner(self.owner)


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease as its holder knows it.

    Attributes:
        resource: what is leased.
        owner: identity of this acquisition, unique even within one process.
        token: the fencing token.
        ttl: seconds of life after each renewal.
        trusted_until: monotonic instant in seconds until which this process may trust the lease. Another
            process' clock has another origin, so a pickled grant arrives without trust (``-inf``).
    """

    resource: str
    owner: str
    token: int
    ttl: float
    trusted_until: float = field(compare=False)

    def __post_init__(self) -> None:
        """Refuse names and tokens that the servers would refuse."""
        check_resource(self.resource)
        check_token(self.token)
        check_owner(self.owner)

    def __reduce__(self) -> tuple[type[Grant], tuple[str, str, int, float, float]]:
        """Pickle what identifies the grant, and no trust."""
        return Grant, (self.resource, self.owner, self.token, self.ttl, -math.inf)


@dataclass(frozen=True, slots=True)
class Lease:
    """What Redis says about a resource at one moment; `remaining` is in seconds."""

    resource: str
    owner: str
    token: int
    remaining: float
