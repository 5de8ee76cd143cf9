"""A worker process that changes a ledger step by step, so that a test can freeze it between any two steps.

Started with one JSON argument: postgres, redis, prefix, ttl, wait (seconds), fenced (with `Guard`, or with the
lease alone), statement (SQL). It says each step that it has reached and waits for a line before the next one:
``holding``, ``begun``, ``written``, and last a JSON object with its outcome.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from fenceguard import Guard, LeaseClient
from support.urls import driver

LEDGER = "ledger:main"


def reached(step: str) -> None:
    print(step, flush=True)
    sys.stdin.readline()


@contextmanager
def leased(order: dict[str, Any]) -> Iterator[tuple[int, Session]]:
    """Hold the ledger, with the fence or with the lease alone; yield the token and a session."""
    redis, engine = Redis.from_url(order["redis"]), create_engine(driver(order["postgres"], "psycopg"))
    if order["fenced"]:
        guard = Guard(redis, engine, ttl=order["ttl"], prefix=order["prefix"])
        with guard.hold(LEDGER, wait=order["wait"]) as held, guard.sessions()() as session:
            yield held.token, session
    else:
        client = LeaseClient(redis, ttl=order["ttl"], prefix=order["prefix"])
        grant = client.acquire(LEDGER, wait=order["wait"])
        with client.heartbeat(grant), Session(engine) as session:
            yield grant.token, session
        client.release(grant)


def main() -> None:
    order = json.loads(sys.argv[1])
    outcome: dict[str, Any] = {"error": None, "sqlstate": None}
    try:
        with leased(order) as (token, session):
            outcome["token"] = token
            reached("holding")
            session.execute(text("select 1"))
            reached("begun")
            session.execute(text(order["statement"]))
            reached("written")
            session.commit()
    except Exception as error:
        outcome |= {"error": type(error).__name__, "sqlstate": getattr(error.__cause__, "sqlstate", None)}
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
