"""What happens in the demo, as values: a worker's job, events, the outcome of a run, the verdict over both.

Two runs of the same work: ``fence`` under a `Guard`, ``lease`` under a `LeaseClient` alone. In each, workers A
and B withdraw from one account, and A is frozen between reading the balance and writing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from fenceguard.errors import StaleToken

Run: TypeAlias = Literal["fence", "lease"]

Order: TypeAlias = Literal["go", "write"]
"""What a worker is told after its job: to begin, and to write what it has computed."""

RUNS: Final[tuple[Run, Run]] = ("fence", "lease")
ACCOUNT_ID: Final = 42
START: Final = 100
AMOUNTS: Final = {"A": 30, "B": 50}
TTL: Final = 1.5
"""Seconds of life of the workers' leases: how long B has to wait for the frozen A's."""
WAIT: Final = 10 * TTL
"""Seconds that a worker waits for the lease of the other one."""


class DemoError(Exception):
    """A run could not be played to its end; the message says which worker did or did not do what."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is told first.

    Attributes:
        name: ``"A"`` or ``"B"``.
        run: under a guard, or under the lease alone.
        postgres: URL, as is `redis`.
        redis: of the server that keeps the leases.
        prefix: of the keys in Redis.
        resource: that names the account.
        trial_resource: for a hold before the story begins, that opens the connections.
        table: that holds the account, with its schema.
    """

    name: str
    run: Run
    postgres: str = field(repr=False)
    redis: str = field(repr=False)
    prefix: str
    resource: str
    trial_resource: str
    table: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        at: seconds since the run began.
        who: ``"A"`` or ``"B"``.
        what: ``acquired``, ``read``, ``frozen``, ``busy``, ``committed``, ``refused``, ``released``, ``lost``,
            ``woken``.
        facts: what is known of it, by name; JSON values.
    """

    at: float
    who: str
    what: str
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def as_json(self) -> dict[str, Any]:
        """Return the event as one flat JSON object."""
        return {"at": round(self.at, 3), "who": self.who, "what": self.what, **self.facts}


@dataclass(slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        run: which one.
        events: in the order of their times.
        balance: of the account at the end, read by nobody's worker; `None` when the run did not come so far.
        problem: why the run was not played to its end, if it was not.
    """

    run: Run
    events: list[Event] = field(default_factory=list[Event])
    balance: int | None = None
    problem: str | None = None

    @property
    def refusal(self) -> Event | None:
        """The refusal of A's write, if there was one."""
        return next((event for event in self.events if (event.who, event.what) == ("A", "refused")), None)

    @property
    def missing_money(self) -> int | None:
        """How much was withdrawn, by transactions that Postgres has committed, and is not in the balance."""
        if self.balance is None:
            return None
        withdrawn = sum(AMOUNTS[event.who] for event in self.events if event.what == "committed")
        return self.balance - (START - withdrawn)


@dataclass(frozen=True, slots=True)
class Story:
    """Both runs.

    Attributes:
        fence: the run under the guard.
        lease: the run under the lease alone.
        servers: where they ran; no passwords.
        seconds: how long it all took.
    """

    fence: Outcome
    lease: Outcome
    servers: Mapping[str, str]
    seconds: float

    def problems(self) -> list[str]:
        """Return what keeps the demo from having shown its point; nothing when it has."""
        return [*self._of_fence(), *self._of_lease()]

    def _of_fence(self) -> Iterator[str]:
        run, refusal = self.fence, self.fence.refusal
        if run.problem is not None:
            yield f"the run with the fence was not completed: {run.problem}"
        elif refusal is None:
            yield "the stale write was not refused"
        elif (said := refusal.facts.get("sqlstate")) != StaleToken.sqlstate:
            yield f"Postgres refused the stale write with SQLSTATE {said}, not {StaleToken.sqlstate}"
        if run.missing_money:
            yield f"with the fence a committed withdrawal of {run.missing_money} was lost"

    def _of_lease(self) -> Iterator[str]:
        if self.lease.problem is not None:
            yield f"the run with the lease alone was not completed: {self.lease.problem}"
        elif not self.lease.missing_money:
            yield "with the lease alone nothing was lost, so the comparison proves nothing"

    def as_json(self) -> dict[str, Any]:
        """Return both runs and the verdict as JSON values."""
        problems = self.problems()
        return {
            "ok": not problems,
            "problems": problems,
            "servers": dict(self.servers),
            "seconds": round(self.seconds, 3),
            "runs": {outcome.run: _outcome_json(outcome) for outcome in (self.fence, self.lease)},
        }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "balance": outcome.balance,
        "missing_money": outcome.missing_money,
        "problem": outcome.problem,
        "events": [event.as_json() for event in outcome.events],
    }
