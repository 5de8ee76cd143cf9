"""The program of a demo worker: withdraw money from an account, once, under a lease.

Both runs and both workers do the same in `withdraw`; only where the lease and the sessions come from differs. It
speaks JSON, a line a message: first it hears its `Job`, then ``{"do": …}`` with each `Order`; it says what it has
done (see `fenceguard.cli._demo.story.Event`), or ``{"what": "failed", "error": …}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import psycopg
from redis import Redis
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from fenceguard import Guard, LeaseClient, LeaseLost, LeaseUnavailable, StaleToken
from fenceguard.cli._demo.story import ACCOUNT_ID, AMOUNTS, TTL, WAIT, DemoError, Job, Order
from fenceguard.cli._settings import Url, parse
from fenceguard.cli._stores import engine_for, ping, reaching, redis_for

Hold: TypeAlias = Callable[[str, float], AbstractContextManager[int]]
"""Given a resource and seconds to wait for its lease, holds it and yields its token."""


def say(what: str, **facts: Any) -> None:
    """Tell the parent."""
    sys.stdout.write(json.dumps({"what": what, **facts}) + "\n")
    sys.stdout.flush()


def hear() -> dict[str, Any]:
    """Return the parent's next message; end quietly when the parent has gone."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(0)
    message: dict[str, Any] = json.loads(line)
    return message


def await_order(order: Order) -> None:
    """Return when the parent gives this order; raises `DemoError` when it says something else."""
    if (said := hear()) != {"do": order}:
        raise DemoError(f"worker should have been told to {order}, but heard {said}")


def withdraw(job: Job, hold: Hold, sessions: sessionmaker[Session]) -> None:
    """Read the balance, hear when to go on, write the smaller balance."""
    with ExitStack() as stack:
        say("acquired", token=stack.enter_context(acquired(job, hold)))
        with sessions.begin() as session:
            account = {"id": ACCOUNT_ID}
            balance = session.execute(text(f"select balance from {job.table} where id = :id"), account).scalar_one()  # noqa: S608 the parent's own table
            rest = balance - AMOUNTS[job.name]
            say("read", balance=balance, amount=AMOUNTS[job.name])
            await_order("write")
            session.execute(
                text(f"update {job.table} set balance = :balance where id = :id"),  # noqa: S608 as above
                account | {"balance": rest},
            )
        say("committed", balance=rest)


@contextmanager
def acquired(job: Job, hold: Hold) -> Generator[int]:
    """Hold the lease, at once or after waiting for it; say so when it has to be waited for."""
    with ExitStack() as stack:
        try:
            token = stack.enter_context(hold(job.resource, 0.0))
        except LeaseUnavailable as busy:
            say("busy", retry_after=busy.retry_after)
            token = stack.enter_context(hold(job.resource, WAIT))
        yield token


def under_guard(job: Job, redis: Redis, engine: Engine) -> tuple[Hold, sessionmaker[Session]]:
    """Lease, heartbeat, claim, and sessions whose writes are fenced."""
    guard = Guard(redis, engine, ttl=TTL, prefix=job.prefix, owner=job.name)

    @contextmanager
    def hold(resource: str, wait: float) -> Generator[int]:
        with guard.hold(resource, wait=wait) as held:
            yield held.token

    return hold, guard.sessions()


def under_lease(job: Job, redis: Redis, engine: Engine) -> tuple[Hold, sessionmaker[Session]]:
    """Lease and heartbeat, as a careful program has them without a fence: it looks at its lease."""
    leases = LeaseClient(redis, ttl=TTL, prefix=job.prefix, owner=job.name)

    @contextmanager
    def hold(resource: str, wait: float) -> Generator[int]:
        grant = leases.acquire(resource, wait=wait)
        try:
            with leases.heartbeat(grant) as trust:
                trust.confirm()
                yield grant.token
                trust.confirm()
        finally:
            leases.release(grant)

    return hold, sessionmaker(engine)


def refusal(error: StaleToken) -> dict[str, Any]:
    """Return what the server itself said, from the driver's error below `error`."""
    below = getattr(error.__cause__, "orig", None) or error.__cause__
    facts: dict[str, Any] = {
        "token": error.token,
        "newest": error.newest,
        "table": error.table,
        "raised": str(error),
    }
    if isinstance(below, psycopg.Error):
        facts |= {
            "sqlstate": below.sqlstate,
            "message": below.diag.message_primary,
            "detail": below.diag.message_detail,
            "hint": below.diag.message_hint,
        }
    return facts


def perform(job: Job, postgres: Url, redis_url: Url) -> None:
    """Connect, hear when to begin, withdraw, and say how it ended."""
    engine, redis = engine_for(postgres), redis_for(redis_url)
    hold, sessions = (under_guard if job.run == "fence" else under_lease)(job, redis, engine)
    ping(redis_url, redis)
    # So that all connections are there: the lease is short, and the story is not about connecting.
    with reaching(postgres), hold(job.trial_resource, 0.0), sessions() as session:
        session.execute(text("select 1"))
    say("ready")
    await_order("go")
    try:
        withdraw(job, hold, sessions)
    except StaleToken as error:
        say("refused", **refusal(error))
    except LeaseLost as error:
        say("lost", reason=error.reason)
    else:
        say("released")


def main() -> None:
    """Do one job."""
    job = Job(**hear())
    urls = [parse("postgres", job.postgres, source="the demo"), parse("redis", job.redis, source="the demo")]
    try:
        perform(job, *urls)
    except Exception as error:  # noqa: BLE001 the parent reports whatever it is
        told = f"{type(error).__name__}: {error}"
        for url in urls:
            told = url.scrub(told)
        say("failed", error=told)


if __name__ == "__main__":
    main()
