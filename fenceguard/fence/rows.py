"""Executing conditional statements: what was written, and whether a row was refused because it is newer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

from sqlalchemy import (
    BinaryExpression,
    BindParameter,
    BooleanClauseList,
    Column,
    ColumnElement,
    Connection,
    Table,
    and_,
    literal,
    or_,
    select,
    true,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.dml import Delete, Insert, Update

from fenceguard.errors import StaleToken
from fenceguard.fence.announce import is_autocommit
from fenceguard.fence.refusals import raise_named
from fenceguard.fence.statements import conditional, inserted_rows, on_conflict, target_fence, token_of
from fenceguard.fence.tables import declared_resource
from fenceguard.model import Claim, Grant
from fenceguard.resources import ANY_RESOURCE, Template

_Row = dict[Column[Any], Any]


def execute_conditional(
    target: Connection | Session, statement: Update | Delete | Insert, by: Claim | Grant | int
) -> int:
    """Execute `conditional(statement, by)` and tell a stale writer from a row that is not there.

    All or nothing: when one of several rows is refused, none is written. The rows are counted by RETURNING, never
    by the driver's row count. From async code: ``await connection.run_sync(execute_conditional, …)``.

    Args:
        target: a connection or session. In AUTOCOMMIT it takes statements that name one row: ``where`` with the
            whole primary key, or an upsert of one row.
        statement: as for `conditional`, without RETURNING.
        by: what is written under.

    Returns:
        How many rows were written; 0 when no row matches, or was written under this very token already.

    Raises:
        StaleToken: a row has a larger fence; has its table, and its key when exactly one row was refused.
        TypeError, ValueError, SchemaMissing: as `conditional`; a ValueError also for a statement that names several
            rows in AUTOCOMMIT, and for one that has RETURNING.
    """
    if not isinstance(target, Connection | Session):  # pyright: ignore[reportUnnecessaryIsInstance] users may err
        raise TypeError(
            f"execute_conditional takes a sync Session or Connection, not {type(target).__name__}; from async "
            "code: await session.run_sync(execute_conditional, …)"
        )
    guarded, token, column = conditional(statement, by), token_of(by), target_fence(statement)
    if statement._returning:  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] no public way to read it
        raise ValueError("execute_conditional returns a count and cannot return rows: leave out returning(…)")
    named = _named_rows(statement)
    try:
        with _all_or_nothing(target, named):
            written = len(target.execute(guarded.returning(column)).all())
            if written < named.least:
                newer = _newer_rows(target, statement, named.condition, token)
                if newer:
                    raise _stale(target, statement, newer, by)
    except DBAPIError as error:
        raise_named(error, target if isinstance(target, Connection) else None)
    return written


class _Named(NamedTuple):
    """The rows that a statement names; with so many written as `least`, none can have been refused."""

    condition: ColumnElement[bool]
    least: float
    is_one: bool


def _named_rows(statement: Update | Delete | Insert) -> _Named:
    if isinstance(statement, Insert):
        rows = inserted_rows(statement)
        if not rows:
            raise ValueError(
                "execute_conditional takes the rows of an upsert by values(…), to look at their fences"
            )
        return _Named(or_(*(_in_conflict(statement, row) for row in rows)), len(rows), len(rows) == 1)
    condition = true() if statement.whereclause is None else statement.whereclause
    is_one = _pins_one_row(cast("Table", statement.table), condition)
    return _Named(condition, 1 if is_one else float("inf"), is_one)


def _pins_one_row(table: Table, condition: ColumnElement[bool]) -> bool:
    """Tell whether a condition is an AND that compares each column of the primary key with a value."""
    conjunction = isinstance(condition, BooleanClauseList) and condition.operator is operators.and_
    parts: Sequence[Any] = cast("Any", condition).clauses if conjunction else [condition]
    compared = [
        part.left
        for part in parts
        if isinstance(part, BinaryExpression)
        and part.operator is operators.eq
        and isinstance(part.right, BindParameter)
    ]
    keys = list(table.primary_key)
    return bool(keys) and all(any(key.compare(left) for left in compared) for key in keys)


def _all_or_nothing(target: Connection | Session, named: _Named) -> AbstractContextManager[object]:
    if named.is_one:
        return nullcontext()
    connection = target if isinstance(target, Connection) else target.connection()
    if is_autocommit(connection):
        raise ValueError(
            "in AUTOCOMMIT a conditional statement must name one row by its whole primary key: of several it could "
            "write some and then find others refused; use a transaction"
        )
    return target.begin_nested()


def _newer_rows(
    target: Connection | Session, statement: Update | Delete | Insert, condition: ColumnElement[bool], token: int
) -> list[_Row]:
    """Read the rows that were refused: a statement of its own, so that it sees what the first one waited for."""
    table, column = cast("Table", statement.table), target_fence(statement)
    columns = [*table.primary_key, column, *_fields(table)]
    query = select(*columns).where(condition, column > token)
    entity: Any = statement.entity_description.get("entity")
    if entity is not None:
        query = query.select_from(entity)
    return [dict(zip(columns, row, strict=True)) for row in target.execute(query)]


def _fields(table: Table) -> list[Column[Any]]:
    source = declared_resource(table)
    names = () if source is None or source == ANY_RESOURCE else Template.parse(source).fields
    return [column for column in table.columns if column.name in names]


def _stale(
    target: Connection | Session, statement: Update | Delete | Insert, newer: list[_Row], by: Claim | Grant | int
) -> StaleToken:
    table, column = cast("Table", statement.table), target_fence(statement)
    newest = max(newer, key=lambda row: row[column])
    keys = {tuple(row[key] for key in table.primary_key) for row in newer}
    key = {part.name: newest[part] for part in table.primary_key} if len(keys) == 1 else None
    dialect = target.dialect if isinstance(target, Connection) else target.get_bind().dialect
    return StaleToken(
        by.resource if isinstance(by, Claim | Grant) else _resource_of(table, newest),
        token_of(by),
        newest[column],
        f"{table.schema or dialect.default_schema_name}.{table.name}",
        key,
    )


def _resource_of(table: Table, row: _Row) -> str:
    """Return the row's resource; the table's name where it declares none or the row names none."""
    source = declared_resource(table)
    if source is None or source == ANY_RESOURCE:
        return table.fullname
    values = {column.name: value for column, value in row.items()}
    try:
        return Template.parse(source).render(values)
    except (TypeError, ValueError):
        return table.fullname


# -- upserts


def _in_conflict(statement: Insert, row: _Row) -> ColumnElement[bool]:
    """Return the condition on the row that `row` would be in conflict with, and that the statement would update."""
    clause = on_conflict(statement)
    parts: list[Any] = [column == row[column] for column in _conflict_columns(statement, row)]
    if clause.inferred_target_whereclause is not None:
        parts.append(clause.inferred_target_whereclause)
    if clause.update_whereclause is not None:
        parts.append(_with_values(clause.update_whereclause, row))
    return and_(*parts)


def _conflict_columns(statement: Insert, row: _Row) -> list[Column[Any]]:
    table, clause = cast("Table", statement.table), on_conflict(statement)
    candidates: list[Any] = [*table.constraints, *table.indexes]
    targets: Sequence[Any] = clause.inferred_target_elements or [
        column
        for candidate in candidates
        if candidate.name == clause.constraint_target
        for column in getattr(candidate, "columns", ())
    ]
    columns = [table.columns.get(target) if isinstance(target, str) else target for target in targets]
    if not columns or any(not isinstance(column, Column) or column not in row for column in columns):
        raise ValueError(
            "execute_conditional looks at the row that is in the way: name the conflict's columns by "
            "index_elements, and give each of them a value"
        )
    return cast("list[Column[Any]]", columns)


def _with_values(condition: ColumnElement[bool], row: _Row) -> ColumnElement[bool]:
    """Replace ``excluded.<column>`` by the value that was to be inserted."""
    by_name = {column.name: (column, value) for column, value in row.items()}

    def replace(element: Any, **_: Any) -> Any:
        if isinstance(element, Column) and getattr(element.table, "name", None) == "excluded":
            column, value = by_name[element.name]
            return literal(value, column.type)  # which leaves an SQL expression as it is
        return None

    try:
        return visitors.replacement_traverse(condition, {}, replace)
    except KeyError:  # a default of the database, which is not known here
        return true()
