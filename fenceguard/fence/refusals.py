"""How Postgres' refusals become fenceguard's errors."""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn

from sqlalchemy import Connection, Table
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.sql.visitors import iterate

from fenceguard._server_error import server_error
from fenceguard.errors import FenceguardError, SchemaMissing, StoreUnreachable, refusal
from fenceguard.fence.tables import fence_column

UNDEFINED_COLUMN: Final = "42703"
UNDEFINED_FUNCTION: Final = "42883"
UNDEFINED_SCHEMA: Final = "3F000"
UNDEFINED_TABLE: Final = "42P01"
KEPT_WAITING: Final = frozenset({"55P03", "57014"})
"""Lock not available within lock_timeout, and a statement_timeout of the role's that was shorter."""
REPEATABLE: Final = frozenset({"40001", "40P01"})
"""Serialization failure and deadlock: the statement may be sent again."""

_NO_ANSWER: Final = ("08", "28", "57P", "53300", "3D000")
"""SQLSTATEs, or how they begin: no connection, login refused, shutdown, too many connections, no such database."""

_NAME: Final = re.compile(r'(?:"(?:[^"]|"")+"|\w+)(?:\s*\.\s*(?:"(?:[^"]|"")+"|\w+))*')
_PARAMETER: Final = re.compile(r"%(?:%|\((.*?)\)s)")


def refused(error: BaseException) -> FenceguardError | None:
    """Return the error that one of fenceguard's own SQLSTATEs stands for, or `None` when it is not ours."""
    said = server_error(error)
    return refusal(said.sqlstate, said.detail)


def raise_named(error: Exception, connection: Connection | None = None) -> NoReturn:
    """Raise the error of ours that a call's failure stands for, with the driver's as its cause, or `error` itself.

    Args:
        error: what connecting or a call of fenceguard's functions raised.
        connection: where it ran, if it did.
    """
    ours = refused(error) or missing(error) or unreachable(error, connection)
    if ours is None:
        raise error
    raise ours from (error.orig if isinstance(error, DBAPIError) else error)


def missing(error: BaseException) -> SchemaMissing | None:
    """Return the error for a call of fenceguard's own functions that Postgres does not know."""
    if server_error(error).sqlstate not in {UNDEFINED_FUNCTION, UNDEFINED_SCHEMA, UNDEFINED_TABLE}:
        return None
    return SchemaMissing(
        "this database has no schema fenceguard, or one that this version does not know",
        "run: fenceguard migrate up",
    )


def missing_name(error: BaseException, statement: str | None, execution: object) -> SchemaMissing | None:
    """Return the error for a user's statement that names something of fenceguard's which is not there.

    What is missing is read from the statement, at the position that the server tells.

    Args:
        error: the driver's exception.
        statement: the text as SQLAlchemy gave it to the driver.
        execution: SQLAlchemy's execution context, which knows the tables when it has built the statement.
    """
    said = server_error(error)
    if said.sqlstate not in {UNDEFINED_FUNCTION, UNDEFINED_SCHEMA, UNDEFINED_COLUMN} or statement is None:
        return None
    name = _name_at(_as_sent(statement) if hasattr(error, "diag") else statement, said.position)
    if said.sqlstate != UNDEFINED_COLUMN:
        return missing(error) if name[:1] == ["fenceguard"] else None
    for table in _tables(execution):
        column = fence_column(table)
        if column is not None and name[-1:] == [column.name]:
            return without_fence(table)
    return None


def _tables(execution: object) -> list[Table]:
    built: Any = getattr(getattr(execution, "compiled", None), "statement", None)
    return [] if built is None else [part for part in iterate(built) if isinstance(part, Table)]


def without_fence(table: Table) -> SchemaMissing:
    """Return the error for a table that lacks its fence column, in the database or in its declaration."""
    return SchemaMissing(
        f"table {table.fullname} has no fence column",
        f"declare it with Fenced and run op.add_fence({table.fullname!r}, resource=…, level=…) in a migration",
    )


def _as_sent(statement: str) -> str:
    """Return the statement as psycopg sends it, which is what its positions count in: ``%(name)s`` is ``$1``."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        name = match.group(1)
        return "%" if name is None else f"${numbers.setdefault(name, len(numbers) + 1)}"

    return _PARAMETER.sub(number, statement)


def _name_at(statement: str, position: int | None) -> list[str]:
    found = None if position is None else _NAME.match(statement, position - 1)
    if found is None:
        return []
    return [part.strip().strip('"') for part in found.group().split(".")]


def unreachable(error: BaseException, connection: Connection | None = None) -> StoreUnreachable | None:
    """Return the error for a Postgres that gave no usable answer, or `None` when it did answer.

    Covers no server, a refused login, no such database, no free connection, and a connection that was cut. What
    the drivers say of these names host, port, user and database, and never the password.

    Args:
        error: what connecting or a statement raised.
        connection: where the statement ran, if it did.
    """
    if isinstance(error, PoolTimeoutError):
        return StoreUnreachable("postgres", f"no free connection in the pool: {error}")
    if isinstance(error, DBAPIError):
        sqlstate = server_error(error).sqlstate
        silent = error.connection_invalidated or (connection is not None and connection.invalidated)
        speechless = sqlstate is None and isinstance(error, OperationalError | InterfaceError)
        if silent or speechless or (sqlstate or "").startswith(_NO_ANSWER):
            return StoreUnreachable("postgres", _first_line(error.orig or error))
    elif isinstance(error, OSError):
        return StoreUnreachable("postgres", _first_line(error))
    return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
