"""Conditional statements: an UPDATE, DELETE or upsert that writes a row only where its fence allows.

On tables without triggers they are the fence; beside triggers, which compare the fence row itself, they also
compare row by row.
"""

from __future__ import annotations

from copy import copy
from typing import Any, TypeVar, cast

from sqlalchemy import BigInteger, BindParameter, Column, ColumnElement, FromClause, Table, literal
from sqlalchemy.dialects.postgresql.dml import OnConflictDoUpdate
from sqlalchemy.sql.dml import Delete, Insert, Update

from fenceguard.fence.refusals import without_fence
from fenceguard.fence.tables import fence_column
from fenceguard.model import Claim, Grant, check_token

S = TypeVar("S", bound="Update | Delete | Insert")


def conditional(statement: S, by: Claim | Grant | int) -> S:
    """Add the fence condition and the stamp: ``set …, fence = :token where … and fence < :token``.

    A token that is not claimed writes each row once, ``fence < :token``; a `Claim`'s holder may write it again,
    ``fence <= :token``. A row whose fence is NULL counts as never written under one: it is written and stamped, so
    that it has a fence afterwards. A row that is refused is left as it is, silently: `execute_conditional` tells.

    Args:
        statement: ``update``, ``delete``, or ``sqlalchemy.dialects.postgresql.insert`` with
            ``on_conflict_do_update``, of Core or of a mapped class.
        by: what is written under.

    Returns:
        A new statement of the same kind.

    Raises:
        TypeError: it is another kind of statement.
        ValueError: an INSERT without ON CONFLICT, which the fence of a row cannot guard, or one from a SELECT;
            or a token out of range.
        SchemaMissing: the table declares no fence.
    """
    token, column = token_of(by), target_fence(statement)
    allowed = column <= token if isinstance(by, Claim) else column < token
    condition = allowed | column.is_(None)
    if isinstance(statement, Insert):
        return cast("S", _conditional_upsert(statement, column, token, condition))
    # By a Core column: the ORM cannot evaluate it on what it has in memory, whose fences may be old, and asks.
    guarded: Any = statement.where(condition)
    if isinstance(statement, Update):
        guarded = guarded.values({column: token})
    return cast("S", guarded)


def token_of(by: Claim | Grant | int) -> int:
    """Return the token that is written under; raises `ValueError` when it is out of range."""
    return by.token if isinstance(by, Claim | Grant) else check_token(by)


def target_fence(statement: object) -> Column[int]:
    """Return the fence column of the table that a statement writes; raises as `conditional`."""
    if not isinstance(statement, Update | Delete | Insert):
        raise TypeError(
            f"a conditional statement is an update, delete or upsert, not {type(statement).__name__}; for others "
            "enter first: fenceguard.fence.enter(connection, claim)"
        )
    table = statement.table
    column = fence_column(table)
    if column is None:
        raise without_fence(cast("Table", table))
    return column


def on_conflict(statement: Insert) -> OnConflictDoUpdate:
    """Return the statement's ON CONFLICT DO UPDATE.

    Raises:
        ValueError: it has none.
    """
    for part in statement.get_children():
        if isinstance(part, OnConflictDoUpdate):
            return part
    raise ValueError(
        "a conditional insert needs on_conflict_do_update (of sqlalchemy.dialects.postgresql.insert): a new row "
        "has no fence to compare; to insert only as the newest holder, enter first"
    )


def inserted_rows(statement: Insert) -> list[dict[Column[Any], Any]]:
    """Return the values of each row to be inserted, as far as the statement itself holds them."""
    single: Any = statement._values  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] no public way to read them
    several: Any = statement._multi_values  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] as above
    rows: list[Any] = [row for some in several for row in some] if several else [single] if single else []
    return [_by_column(statement.table, row) for row in rows]


def _by_column(table: FromClause, row: Any) -> dict[Column[Any], Any]:
    pairs: Any = row.items() if hasattr(row, "items") else zip(table.columns.keys(), row, strict=False)
    found: dict[Column[Any], Any] = {}
    for key, value in pairs:
        column: Any = table.columns[key] if isinstance(key, str) else key
        bound: Any = value
        found[column] = bound.effective_value if isinstance(value, BindParameter) else bound
    return found


def _conditional_upsert(
    statement: Insert, column: Column[int], token: int, condition: ColumnElement[bool]
) -> Insert:
    if statement.select is not None:
        raise ValueError(
            "a conditional upsert takes its rows by values(…) or as parameters, not from a SELECT: add the fence "
            "to from_select yourself, or enter first and use the plain statement"
        )
    clause = copy(on_conflict(statement))
    clause.update_values_to_set = {**clause.update_values_to_set, column: literal(token, BigInteger)}
    where = clause.update_whereclause
    clause.update_whereclause = condition if where is None else where & condition
    if statement._multi_values:  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] values() takes no second list
        several: Any = ([{**row, column: token} for row in inserted_rows(statement)],)
        stamped = copy(statement)
        stamped._multi_values = several  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] as above
    else:
        stamped = statement.values({column: token})
    return stamped.ext(clause)
