"""Fenced tables: the row fence that a model or a Core table declares."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from sqlalchemy import CHAR, BigInteger, Column, Connection, Enum, Integer, String, Table, Uuid, event, text
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.orm import Mapper, object_session
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.schema import Index, UniqueConstraint
from sqlalchemy.sql.selectable import FromClause
from sqlalchemy.types import TypeDecorator, TypeEngine

from fenceguard.fence.announce import announcement
from fenceguard.model import LEVELS, Level
from fenceguard.resources import Template

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapped

FENCE: Final = "fenceguard"
"""Key in a column's `info`: marks the fence column; the value holds ``resource`` and ``level`` as declared."""


def new_fence_column(
    name: str = "fence", *, resource: str | None = None, level: Level | None = None
) -> Column[int]:
    """Make the fence column of a Core table, to be given to `Table` beside its other columns.

    Args:
        name: of the column.
        resource: how a row names its resource, as `Fenced.__fence_resource__`.
        level: what Postgres does, as `Fenced.__fence_level__`.

    Raises:
        ValueError: `resource` is no template, or `level` is none of `LEVELS`.
    """
    _check_declared(f"column {name!r}", resource, level)
    return Column(
        name,
        BigInteger,
        nullable=False,
        server_default=text("0"),
        info={FENCE: {"resource": resource, "level": level}},
    )


def fence_column(table: FromClause) -> Column[int] | None:
    """Return the fence column of a table, of a model's or of a Core one, or `None` when it declares none."""
    for column in table.columns:
        if FENCE in column.info:
            return column  # type: ignore[return-value] # a table's columns are Column
    return None


def declared_resource(table: FromClause) -> str | None:
    """Return how the table's rows name their resource, as declared, or `None`."""
    column = fence_column(table)
    declared: str | None = None if column is None else column.info[FENCE]["resource"]
    return declared


class Fenced:
    """Mixin of a mapped class whose rows carry the token that last wrote them.

    Adds the column and attribute ``fence``, bigint not null default 0, written by the database's trigger. The
    ORM never writes it; after a flush under an announced grant the attribute shows the token that was stamped.
    ::

        class Account(Fenced, Base):
            __tablename__ = "account"
            __fence_resource__ = "account:{id}"
            __fence_level__ = "enforce"
            id: Mapped[int] = mapped_column(primary_key=True)

    Keep the column out of every index: with it in one, HOT updates fall from 99 % to under 1 %, so that
    declaring one is a `ValueError`.

    Attributes:
        __fence_resource__: how a row names its resource: a template over the table's int, str and UUID columns,
            a constant, or `ANY_RESOURCE`.
        __fence_level__: what Postgres refuses: stale writes (``reject``), or unannounced ones too (``enforce``).
        __fence_column__: name of column and attribute where ``fence`` is taken.

    Raises:
        ValueError: at class creation; one of the three is malformed, or the name of the column is taken.
        TypeError: at class creation; a field of the template is a column of another type.
    """

    __fence_resource__: ClassVar[str | None] = None
    __fence_level__: ClassVar[Level | None] = None
    __fence_column__: ClassVar[str] = "fence"

    if TYPE_CHECKING:
        # Added when the class is mapped, and not by declarative's scan: the name may be another, and a
        # dataclass must not have it as a field.
        fence: Mapped[int]


class FencedDataclass(Fenced):
    """`Fenced` for models of `MappedAsDataclass`: the row fence is no field of the dataclass.

    It is not in ``__init__``, ``repr`` or comparisons.
    """


@event.listens_for(Fenced, "after_mapper_constructed", propagate=True)
def _declare(mapper: Mapper[Any], model: type[Fenced]) -> None:
    if mapper.inherits is not None and issubclass(mapper.inherits.class_, Fenced):
        return  # the fence is in the table of the base
    table = cast("Table", mapper.local_table)
    resource, level, name = model.__fence_resource__, model.__fence_level__, model.__fence_column__
    _check_declared(model.__name__, resource, level)
    column = fence_column(table)
    if column is None:
        if name in table.columns or hasattr(model, name):
            raise ValueError(
                f"{model.__name__} has {name!r} already; give its fence another name with __fence_column__"
            )
        column = new_fence_column(name, resource=resource, level=level)
        table.append_column(column)
        mapper.add_property(name, column)
    else:
        column.info[FENCE] = {"resource": resource, "level": level}
    if resource is not None:
        _check_fields(table, Template.parse(resource))


@event.listens_for(Fenced, "after_update", propagate=True)
def _show_stamp(mapper: Mapper[Any], connection: Connection, row: Fenced) -> None:
    """Let the attribute show what the trigger has stamped, without a query.

    Marking the column as written by the server would expire the attribute with each UPDATE, and reading it then
    fails under asyncio; fetching it by RETURNING would end executemany.
    """
    state, source = announcement(connection), row.__fence_resource__
    if state is None or not state.sent or source is None or row.__fence_level__ is None:
        return
    session = object_session(row)
    if session is None or not session.is_modified(row, include_collections=False):
        return  # nothing was written
    table: Any = mapper.column_attrs[row.__fence_column__].columns[0].table  # of the base, where classes inherit
    columns = {column.name: column for column in table.columns}
    try:
        resource = _template(source).render(
            lambda name: getattr(row, mapper.get_property_by_column(columns[name]).key)
        )
        token, _ = state.sent[resource]
    except (KeyError, TypeError, ValueError):  # not announced, or ANY_RESOURCE: not stamped
        return
    set_committed_value(row, row.__fence_column__, token)


@cache
def _template(source: str) -> Template:
    return Template.parse(source)


def _check_declared(where: str, resource: str | None, level: Level | None) -> None:
    if level is not None and level not in LEVELS:
        raise ValueError(f"{where}: levels are {' and '.join(LEVELS)} in this version, not {level!r}")
    if resource is not None:
        Template.parse(resource)


def _check_fields(table: Table, template: Template) -> None:
    for name in template.fields:
        column = next((column for column in table.columns if column.name == name), None)
        where = f"resource {template.source!r} of table {table.fullname}"
        if column is None:
            raise ValueError(f"{where}: it has no column {name!r}; fields name columns")
        if column.computed is not None:
            raise ValueError(f"{where}: {name!r} is generated, which a BEFORE trigger cannot see; use its sources")
        if not _reads_alike(column.type):
            raise TypeError(
                f"{where}: {name!r} is {column.type}; fields are int, str and UUID columns, whose texts are the "
                "same in Python and Postgres"
            )


def _reads_alike(declared: TypeEngine[Any]) -> bool:
    """Tell whether values of a type have the same text in Python and in Postgres."""
    kind = declared.impl_instance if isinstance(declared, TypeDecorator) else declared
    if isinstance(kind, Uuid):
        return bool(kind.native_uuid)
    return isinstance(kind, Integer | String) and not isinstance(kind, Enum | CHAR | CITEXT)


@event.listens_for(Index, "after_parent_attach")
@event.listens_for(UniqueConstraint, "after_parent_attach")
def _refuse_index(indexed: Index | UniqueConstraint, table: Any) -> None:
    if isinstance(table, Table) and any(FENCE in column.info for column in indexed.columns):
        raise ValueError(
            f"{type(indexed).__name__} {indexed.name!r} of table {table.fullname} holds the fence column: every "
            "write changes it, and an index over it ends HOT updates; leave it out"
        )
