"""Claim and enter: the calls of fenceguard's SQL functions.

From async code: ``await connection.run_sync(claim, …)`` and ``await session.run_sync(enter, …)``.
"""

from __future__ import annotations

import math
from time import monotonic
from typing import Any, Final

from sqlalchemy import BigInteger, Connection, Executable, Integer, Select, Text, func, literal, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fenceguard._server_error import server_error
from fenceguard.errors import ClaimTimeout
from fenceguard.fence.announce import announcement, is_autocommit
from fenceguard.fence.hooks import OWN
from fenceguard.fence.refusals import KEPT_WAITING, REPEATABLE, raise_named
from fenceguard.model import Claim, Grant, check_seconds

_MAX_REPEATS: Final = 8
"""Of a claim after a serialization failure, which each claim that others make meanwhile may cause."""

_MAX_WAIT_MS: Final = 2**31 - 1


def claim(connection: Connection, resource: str, token: int, owner: str, *, wait: float | None = None) -> Claim:
    """Raise the fence of `resource` to `token`: from then on no write under a smaller one can commit.

    One statement that commits by itself. A claim that is there already under the same token and owner is
    recognised, so that it may be sent again after a lost reply.

    Args:
        connection: in AUTOCOMMIT, ``engine.connect().execution_options(isolation_level="AUTOCOMMIT")``: a claim
            inside a transaction would keep all writers of the resource out until that ends.
        resource: 1 to 512 bytes of UTF-8 without control characters.
        token: any integer from 1 to 2**53 - 1 that grows with each holder.
        owner: identity of this acquisition.
        wait: seconds to wait for open transactions of earlier holders; 0 tries once; `None` leaves it to the
            session's ``lock_timeout``.

    Raises:
        StaleToken: the resource has been claimed under this token or a newer one; says which, and by whom.
        ClaimTimeout: open transactions kept it waiting; names them.
        SchemaMissing: the database lacks fenceguard's schema.
        StoreUnreachable: the connection was cut; whether the fence was raised is not known, so claim again.
        ValueError: the connection is not in AUTOCOMMIT, or an argument breaks its rule.
    """
    wanted = Claim(resource, token, owner)
    if wait is not None:
        check_seconds("wait", wait)
    _check_connection(connection)
    if not _autocommits(connection):
        raise ValueError(
            'claim needs a connection in AUTOCOMMIT: connection.execution_options(isolation_level="AUTOCOMMIT")'
        )
    began = connection.in_transaction()
    try:
        return _claim(connection, wanted, wait)
    finally:
        if not began:
            connection.rollback()  # of SQLAlchemy's own bookkeeping; the server is in no transaction


def _autocommits(connection: Connection) -> bool:
    if is_autocommit(connection):
        return True
    wanted = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
    if wanted:
        # Of a connection that was cut SQLAlchemy makes a new one, and forgets this option.
        connection.execution_options(isolation_level="AUTOCOMMIT")
    return wanted


def _check_connection(connection: object) -> None:
    if not isinstance(connection, Connection):
        raise TypeError(
            f"claim takes a sqlalchemy Connection, not {type(connection).__name__}; from async code: "
            "await connection.run_sync(claim, …)"
        )


def _claim(connection: Connection, wanted: Claim, wait: float | None) -> Claim:
    asked_at, repeats = monotonic(), 0
    while True:
        waited = monotonic() - asked_at
        try:
            _execute(connection, _claiming(wanted, None if wait is None else max(0.0, wait - waited)))
        except DBAPIError as error:
            waited, sqlstate = monotonic() - asked_at, server_error(error).sqlstate
            repeats += sqlstate in REPEATABLE
            if sqlstate in REPEATABLE and repeats <= _MAX_REPEATS and (wait is None or waited <= wait):
                continue
            if sqlstate in REPEATABLE | KEPT_WAITING:
                raise ClaimTimeout(wanted.resource, waited, _holders(connection, wanted.resource)) from error.orig
            raise_named(error, connection)
        else:
            return wanted


def _claiming(wanted: Claim, wait: float | None) -> Select[Any]:
    wait_ms = None if wait is None else min(math.ceil(wait * 1000), _MAX_WAIT_MS)
    return select(
        func.fenceguard.claim(
            literal(wanted.resource, Text),
            literal(wanted.token, BigInteger),
            literal(wanted.owner, Text),
            literal(wait_ms, Integer),
        )
    )


def _holders(connection: Connection, resource: str) -> list[str]:
    try:
        found = _execute(connection, select(func.fenceguard.gate_holders(literal(resource, Text))))
    except DBAPIError:
        return []  # a role that may claim but not look
    return [line for (line,) in found]


def enter(target: Session | Connection, claim: Claim | Grant) -> None:
    """Prove in the open transaction that `claim` is the newest of its resource, and stay so until it ends.

    Announces the claim for the rest of the transaction and enters at once: for tables without a fence, before
    ``select … for update`` on a hot resource, and before costly work. A later claim waits for this transaction.

    Args:
        target: a connection or session in a transaction.
        claim: what was claimed.

    Raises:
        StaleToken: a newer token has claimed the resource.
        NotClaimed: it was never claimed under this token, or Postgres lost the claim.
        TransactionTooOld: the transaction's snapshot is older than the claim; repeat it in a new one.
        TooManyResources: the transaction has entered 64 already.
        SchemaMissing: the database lacks fenceguard's schema.
        ValueError: `target` is in no transaction.
    """
    connection = _in_transaction(target)
    statement = select(
        func.fenceguard.enter(
            literal(claim.resource, Text), literal(claim.token, BigInteger), literal(claim.owner, Text)
        )
    )
    try:
        connection.execute(statement)
    except DBAPIError as error:
        raise_named(error, connection)
    state = announcement(connection)
    if state is not None:
        state.entered.append(claim)
        if state.sent is not None:
            state.sent = {**state.sent, claim.resource: (claim.token, claim.owner)}


def _in_transaction(target: Session | Connection) -> Connection:
    if not target.in_transaction():
        raise ValueError("enter needs an open transaction, and this one has not begun: with connection.begin(): …")
    connection = target if isinstance(target, Connection) else target.connection()
    if is_autocommit(connection):
        raise ValueError(
            "enter needs an open transaction, and this connection is in AUTOCOMMIT: nothing would stay"
        )
    return connection


def _execute(connection: Connection, statement: Executable) -> list[Any]:
    return list(connection.execute(statement, execution_options={OWN: True}))
