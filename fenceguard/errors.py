"""What can go wrong, as one tree; every error pickles.

::

    FenceguardError
    ├── LeaseUnavailable      somebody else holds the lease
    ├── LeaseLost             my trust in my lease has ended
    ├── StaleToken            ZF001  a newer token has claimed the resource
    ├── UnfencedWrite         ZF002  a write on an enforced table announces no grant
    ├── NotClaimed            ZF003  the token was announced but never claimed on this timeline
    ├── WrongResource         ZF004  the row belongs to a resource that is not announced
    ├── TransactionTooOld     ZF005  the transaction's snapshot is older than the claim
    ├── TooManyResources      ZF006  one transaction enters more resources than the server could lock
    ├── ClaimTimeout          open transactions of earlier holders kept the claim waiting
    ├── OpenTransaction       a transaction of an ended hold is still open
    ├── OutcomeUnknown        the connection was cut during COMMIT
    ├── SchemaMissing         fenceguard's schema, or a table's fence, is not what this version needs
    ├── TablesStillFenced     fenceguard's schema cannot be removed while tables need it
    ├── StoreUnreachable      Redis or Postgres gave no usable answer
    └── EmbeddedUnavailable   a private server cannot run on this machine

Misuse is a `ValueError` or a `TypeError`, and "busy" is an answer where a call can give one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

LostReason: TypeAlias = Literal[
    "taken_over", "missing", "store_unreachable", "suspended", "released", "forked", "max_hold"
]

_LOST: dict[LostReason, str] = {
    "taken_over": "another owner holds it now",
    "missing": "Redis no longer has it (expired, evicted or flushed)",
    "store_unreachable": "it could not be renewed in time, Redis did not answer",
    "suspended": "this process, or the event loop that renews it, was stopped or busy for longer than it lasts",
    "released": "it was released; the work that used it has outlived its hold",
    "forked": "it belongs to the parent process; acquire one in the child",
    "max_hold": "it was held for as long as max_hold allows",
}


_BY_SQLSTATE: dict[str, type[FenceguardError]] = {}


class FenceguardError(Exception):
    """Base of all errors of fenceguard."""

    sqlstate: ClassVar[str | None] = None
    """The SQLSTATE by which Postgres reports this error, where it does."""

    def __init_subclass__(cls, *, sqlstate: str | None = None) -> None:
        """Register the SQLSTATE of a subclass."""
        if sqlstate is not None:
            cls.sqlstate = sqlstate
            _BY_SQLSTATE[sqlstate] = cls

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message and the attributes, whatever the constructor's signature."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(cls: type[FenceguardError], args: tuple[Any, ...], state: dict[str, Any]) -> FenceguardError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


def refusal(sqlstate: str | None, detail: str | None) -> FenceguardError | None:
    """Return the error that a SQLSTATE and the JSON of its DETAIL stand for, or `None` when it is not ours.

    The schema's functions name the members of the DETAIL after the parameters of the error's class.
    """
    cls = _BY_SQLSTATE.get(sqlstate or "")
    if cls is None:
        return None
    try:
        return cls(**json.loads(detail or ""))
    except (TypeError, ValueError):
        return None  # somebody else's error under our code: it speaks for itself


class LeaseUnavailable(FenceguardError):
    """Somebody else holds the lease; the work has not begun.

    Attributes:
        resource: what was asked for.
        owner: who holds it, as far as known.
        retry_after: seconds after which its lease ends unless it is renewed.
    """

    def __init__(self, resource: str, owner: str, retry_after: float) -> None:
        """Name the holder and when it is worth asking again."""
        super().__init__(
            f"the lease on {resource!r} is held by {owner!r}; unless renewed it ends in {retry_after:.3f} s"
        )
        self.resource, self.owner, self.retry_after = resource, owner, retry_after


class LeaseLost(FenceguardError):
    """This holder may no longer act on the resource; what it wrote before stands or was refused.

    Attributes:
        resource: what was leased.
        reason: one of ``taken_over``, ``missing``, ``store_unreachable``, ``suspended``, ``released``,
            ``forked``, ``max_hold``.
    """

    def __init__(self, resource: str, reason: LostReason) -> None:
        """Say why."""
        super().__init__(f"the lease on {resource!r} is lost ({reason}): {_LOST[reason]}")
        self.resource = resource
        self.reason: LostReason = reason


class StaleToken(FenceguardError, sqlstate="ZF001"):
    """A newer token has claimed the resource; this write was refused and must not be retried.

    Attributes:
        resource: what the write belongs to.
        token: the refused token.
        newest: the newest token known to Postgres; equal to `token` when another owner has claimed it. Above
            READ COMMITTED it may be hidden from the transaction; then it is the least that it can be.
        table: the table that was written to, as ``schema.table``; `None` for a claim.
        key: the primary key of the refused row by column; `None` unless exactly one row was refused.
        owner: who has claimed `newest`, where the server says.
    """

    def __init__(  # noqa: PLR0913 the facts of one refusal
        self,
        resource: str,
        token: int,
        newest: int,
        table: str | None = None,
        key: Mapping[str, Any] | None = None,
        *,
        owner: str | None = None,
    ) -> None:
        """Name both tokens, and the table and row where they are known."""
        where = "" if table is None else f" to {table}" + ("" if key is None else f" {dict(key)}")
        whose = f"token {newest} has" if newest != token else f"another owner has token {newest} and has"
        super().__init__(
            f"write{where} for {resource!r} under token {token} was refused: {whose} claimed it since; "
            "stop, and do not retry under this token"
        )
        self.resource, self.token, self.newest = resource, token, newest
        self.table, self.key, self.owner = table, None if key is None else dict(key), owner


class UnfencedWrite(FenceguardError, sqlstate="ZF002"):
    """A write on an enforced table announces no grant.

    Attributes:
        table: the table that was written to, as ``schema.table``.
    """

    def __init__(self, table: str) -> None:
        """Say what to do instead."""
        super().__init__(
            f"{table} is enforced and the transaction announces no grant: write under a hold of its resource (what "
            "is flushed or committed after a hold has ended is outside it: see session=), or inside "
            "fenceguard.fence.unfenced(session, reason=...) for maintenance"
        )
        self.table = table


class NotClaimed(FenceguardError, sqlstate="ZF003"):
    """The token was announced but Postgres knows no such claim on its present timeline.

    Attributes:
        resource: what the token is for.
        token: the announced token.
    """

    def __init__(self, resource: str, token: int) -> None:
        """Say that a claim is missing or was forgotten."""
        super().__init__(
            f"token {token} for {resource!r} is not claimed here: it never was, or Postgres lost the claim in a "
            "failover or restore; acquire the lease again and claim its token"
        )
        self.resource, self.token = resource, token


class WrongResource(FenceguardError, sqlstate="ZF004"):
    """A row belongs to a resource that the transaction does not announce.

    Attributes:
        table: the table that was written to, as ``schema.table``.
        resource: what the row belongs to; `None` when it names none (a template column is empty or NULL, or
            holds a separator).
        announced: the resources that are announced.
    """

    def __init__(self, table: str, resource: str | None, announced: list[str]) -> None:
        """Name the row's resource beside the announced ones."""
        whose = "names no valid resource" if resource is None else f"belongs to {resource!r}"
        super().__init__(
            f"a row of {table} {whose}, and the transaction announces {announced}; hold the row's resource "
            "(for a row that moves, both)"
        )
        self.table, self.resource, self.announced = table, resource, announced


class TransactionTooOld(FenceguardError, sqlstate="ZF005"):
    """The transaction's snapshot is older than the claim it announces; a new transaction may succeed.

    Attributes:
        resource: what the token is for.
        token: the announced token.
    """

    def __init__(self, resource: str, token: int) -> None:
        """Say what to do."""
        super().__init__(
            f"this transaction began before token {token} for {resource!r} was claimed and cannot see the claim "
            "at its isolation level; roll back and repeat it in a new transaction"
        )
        self.resource, self.token = resource, token


class TooManyResources(FenceguardError, sqlstate="ZF006"):
    """One transaction announces more resources than it may enter.

    Attributes:
        count: how many it announces.
        limit: how many it may.
    """

    def __init__(self, count: int, limit: int) -> None:
        """Say what to do."""
        super().__init__(
            f"the transaction announces {count} resources, at most {limit} are allowed (each takes a lock in "
            "the server's shared table); use several transactions or one coarser resource"
        )
        self.count, self.limit = count, limit


class ClaimTimeout(FenceguardError):
    """Open transactions of earlier holders kept the claim waiting, and the fence was not raised.

    A `hold` that cannot begin for it gives its lease back. A hold that has to claim anew at BEGIN keeps its lease,
    and `fenceguard.fence.claim` knows of none.

    Attributes:
        resource: what was to be claimed.
        waited: seconds.
        holders: a text for each transaction in the way: its backend, state and query, or the gid of a
            prepared transaction.
    """

    def __init__(self, resource: str, waited: float, holders: list[str]) -> None:
        """Name who is in the way."""
        who = "; ".join(holders) or "nobody any more"
        super().__init__(
            f"{resource!r} could not be claimed within {waited:.3f} s, open transactions hold it: {who}; end "
            "them, or wait longer"
        )
        self.resource, self.waited, self.holders = resource, waited, holders


class OpenTransaction(FenceguardError):
    """A transaction that entered under an ended hold is still open, and a new hold would wait for it.

    Attributes:
        resource: what both hold.
    """

    def __init__(self, resource: str) -> None:
        """Say what to do."""
        super().__init__(
            f"a transaction that wrote under an earlier hold of {resource!r} is still open; commit or roll it "
            "back before holding the resource again"
        )
        self.resource = resource


class OutcomeUnknown(FenceguardError):
    """The connection was cut during COMMIT: the transaction is committed or rolled back, ask which.

    Attributes:
        xid: the transaction's 64-bit id.
        timeline: the WAL timeline it ran on.
    """

    def __init__(self, xid: int, timeline: str) -> None:
        """Say how to find out."""
        super().__init__(
            f"the outcome of transaction {xid} on timeline {timeline} is unknown, its connection was cut during "
            f"COMMIT; ask on that timeline with select pg_xact_status('{xid}') and do not blindly repeat the work"
        )
        self.xid, self.timeline = xid, timeline


class SchemaMissing(FenceguardError):
    """fenceguard's schema is missing, too old or too new, or a table lacks its fence.

    Attributes:
        problem: what is wrong, and where.
        remedy: the command or operation that mends it.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        """Join the two."""
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


class TablesStillFenced(FenceguardError):
    """fenceguard's schema cannot be removed: tables still have its triggers.

    Attributes:
        tables: their names, as ``schema.table``.
    """

    def __init__(self, tables: list[str]) -> None:
        """Name them."""
        super().__init__(
            f"fenceguard's schema cannot be removed, tables are still fenced: {', '.join(tables)}; take their "
            "fences off first, with op.drop_fence or fenceguard.drop_fence"
        )
        self.tables = tables


class StoreUnreachable(FenceguardError):
    """Redis or Postgres gave no usable answer: no server, a refused login, a time-out, or a server of another kind.

    Attributes:
        store: ``"redis"`` or ``"postgres"``.
        problem: what happened and where; never holds a password.
    """

    def __init__(self, store: Literal["redis", "postgres"], problem: str) -> None:
        """Name the store and what it said."""
        super().__init__(f"{store} gave no usable answer: {problem}")
        self.store, self.problem = store, problem


class EmbeddedUnavailable(FenceguardError):
    """A private server cannot run here: its wheel is missing, the platform lacks a binary, or it did not start.

    Attributes:
        server: ``"postgres"`` or ``"valkey"``.
        problem: what is wrong and what to do, or the end of the server's log.
    """

    def __init__(self, server: Literal["postgres", "valkey"], problem: str) -> None:
        """Name the server."""
        super().__init__(f"a private {server} cannot run here: {problem}")
        self.server, self.problem = server, problem
