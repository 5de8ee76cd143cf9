"""What the tests of the fence share: a source of grants, and questions to the server."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session
from support import sql

from fenceguard import Claim, StaleToken
from fenceguard.fence.announce import Announcement

KEY = "account:42"
ACCOUNTS = (40, 41, 42, 43, 44)


@dataclass
class Holds:
    """A source of grants that a test fills and empties; what it is told is kept."""

    grants: list[Claim] = field(default_factory=list)
    begun: int = 0
    transactions: list[Announcement] = field(default_factory=list)
    refusals: list[StaleToken] = field(default_factory=list)
    commits: int = 0
    lost: Exception | None = None

    def at_begin(self) -> list[Claim]:
        self.begun += 1
        if self.lost is not None:
            raise self.lost
        return self.grants

    def now(self) -> list[Claim]:
        return self.grants

    def announced(self, transaction: Announcement) -> None:
        self.transactions.append(transaction)

    def refused(self, error: StaleToken) -> None:
        self.refusals.append(error)

    @contextmanager
    def committing(self) -> Generator[None]:
        self.commits += 1
        yield


def claimed(connection: psycopg.Connection[Any], token: int, resource: str = KEY, owner: str = "a") -> Claim:
    """Claim and return the claim."""
    sql.claim(connection, resource, token, owner)
    return Claim(resource, token, owner)


def all_claimed(
    connection: psycopg.Connection[Any], token: int, accounts: Iterable[int], owner: str
) -> list[Claim]:
    """Claim several accounts."""
    return [claimed(connection, token, f"account:{account}", owner) for account in accounts]


def announced(on: Connection | Session) -> dict[str, Any]:
    """Return what the transaction announces, as the server knows it."""
    told = on.execute(text("select current_setting('fenceguard.grants', true)")).scalar()
    return json.loads(told or "{}")


def told(*claims: Claim) -> dict[str, Any]:
    """Return the announcement of some claims."""
    return {claim.resource: {"token": claim.token, "owner": claim.owner} for claim in claims}
