"""``op.add_fence`` and ``op.drop_fence`` for the migrations of your own chain.

Both are thin calls of the SQL functions of the same name, which hold all logic: they work online, with ``--sql``
and from psql alike.
"""

from __future__ import annotations

from typing import Final, NoReturn

from alembic.operations import MigrateOperation, Operations
from sqlalchemy.exc import DBAPIError

from fenceguard._server_error import server_error
from fenceguard.errors import SchemaMissing
from fenceguard.model import Level
from fenceguard.resources import ANY_RESOURCE, Template
from fenceguard.schema.checks import check_version
from fenceguard.schema.scripts import literal_text, quote_literal, quote_name

_MISSING: Final = {
    "42704": "add it with op.add_fence",
    "42501": "grant the rights that the README shows",
}
"""undefined_object and insufficient_privilege, with the remedy where the server names none."""

_MISUSE: Final = {
    "0A000": "",
    "22023": "",
    "42703": "",
    "42710": "",
    "42804": "",
    "42809": "",
    "3F000": "create it first, or name another schema",
    "42P01": "create it first, or name its schema",
}
"""What `add_fence` says of a table, template, column or level that it cannot take."""


class AddFence(MigrateOperation):
    """Fence a table."""

    def __init__(self, table: str, *, resource: str, level: Level, schema: str | None, column: str) -> None:
        """Check what can be checked without a database."""
        if resource != ANY_RESOURCE:
            Template.parse(resource)
        self.table, self.resource, self.level, self.schema, self.column = table, resource, level, schema, column

    @classmethod
    def add_fence(  # noqa: PLR0913 the surface
        cls,
        operations: Operations,
        table: str,
        *,
        resource: str,
        level: Level,
        schema: str | None = None,
        column: str = "fence",
    ) -> None:
        """Fence `table`: add its column where it is missing, and the triggers that guard it.

        Does nothing where it is fenced so already.

        Args:
            operations: given by Alembic.
            table: its name; a partitioned table is fenced with all its partitions.
            resource: a template over its columns (``"account:{id}"``), a constant, or `ANY_RESOURCE`.
            level: ``"reject"`` (unannounced writes pass) or ``"enforce"`` (they are refused).
            schema: of the table; the search path finds it when `None`.
            column: the row fence, ``bigint not null default 0``.

        Raises:
            ValueError: table, template, column or level will not do; nothing has been changed.
            SchemaMissing: fenceguard's own schema is missing, older or newer.
        """
        operations.invoke(cls(table, resource=resource, level=level, schema=schema, column=column))

    def reverse(self) -> DropFence:
        """Return the operation that takes this one back."""
        return DropFence(self.table, schema=self.schema)

    def to_sql(self) -> str:
        """Return the statement."""
        arguments = ", ".join(quote_literal(value) for value in (self.resource, self.level, self.column))
        return f"select fenceguard.add_fence({_regclass(self.table, self.schema)}, {arguments})"


class DropFence(MigrateOperation):
    """Take the fence off a table."""

    def __init__(self, table: str, *, schema: str | None) -> None:
        """Name the table."""
        self.table, self.schema = table, schema

    @classmethod
    def drop_fence(cls, operations: Operations, table: str, *, schema: str | None = None) -> None:
        """Take the fence off `table`: its triggers and its column.

        Raises:
            SchemaMissing: the table has no fence, or fenceguard's own schema is missing, older or newer.
        """
        operations.invoke(cls(table, schema=schema))

    def to_sql(self) -> str:
        """Return the statement."""
        return f"select fenceguard.drop_fence({_regclass(self.table, self.schema)})"


def register() -> None:
    """Give `alembic.op` the operations; call it in your ``env.py``. Calling it again changes nothing."""
    if not hasattr(Operations, "add_fence"):
        Operations.register_operation("add_fence")(AddFence)
        Operations.implementation_for(AddFence)(_perform)
        Operations.register_operation("drop_fence")(DropFence)
        Operations.implementation_for(DropFence)(_perform)


def _perform(operations: Operations, operation: AddFence | DropFence) -> None:
    context = operations.migration_context
    if not context.as_sql and context.connection is not None:
        check_version(context.connection)
    try:
        operations.execute(literal_text(operation.to_sql()))
    except DBAPIError as error:
        _raise_named(error)


def _raise_named(error: DBAPIError) -> NoReturn:
    said = server_error(error)
    if said.sqlstate in _MISSING:
        raise SchemaMissing(str(said.message), said.hint or _MISSING[said.sqlstate]) from error
    if said.sqlstate in _MISUSE:
        raise ValueError(f"{said.message}; {said.hint or _MISUSE[said.sqlstate]}") from error
    raise error


def _regclass(table: str, schema: str | None) -> str:
    name = quote_name(table) if schema is None else f"{quote_name(schema)}.{quote_name(table)}"
    return f"{quote_literal(name)}::regclass"
