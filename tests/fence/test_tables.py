"""Fenced models and Core tables: what they declare, and what is refused where it is declared."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import fields
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from fence_talk import Holds, claimed
from sqlalchemy import (
    CHAR,
    BigInteger,
    Column,
    Computed,
    DateTime,
    Engine,
    Enum,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Numeric,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    Uuid,
    event,
    select,
)
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column
from sqlalchemy.schema import CreateTable
from support.bank import Account

from fenceguard import ANY_RESOURCE, Fenced, FencedDataclass
from fenceguard.fence import fence_column, new_fence_column
from fenceguard.fence.tables import FENCE

Bank = psycopg.Connection[Any]


DRIVERS = ("psycopg", "asyncpg")  # async psycopg sends what psycopg sends


class Base(DeclarativeBase):
    pass


def model(**body: Any) -> type[Any]:
    """Make a fenced class with a primary key ``id``; what a class statement would do."""

    class Own(DeclarativeBase):
        pass

    return type("Doc", (Fenced, Own), {"__tablename__": "doc", "id": Column(Integer, primary_key=True), **body})


def test_a_fenced_model_has_the_column_bigint_not_null_default_0() -> None:
    created = str(CreateTable(Account.__table__))  # type: ignore[arg-type] # a Table
    assert "fence BIGINT DEFAULT 0 NOT NULL" in created
    assert fence_column(Account.__table__) is Account.__table__.c.fence


def test_the_mark_of_the_column_holds_what_the_model_declares() -> None:
    assert Account.__table__.c.fence.info[FENCE] == {"resource": "account:{id}", "level": "enforce"}


def test_the_fence_may_have_another_name_beside_a_column_called_fence() -> None:
    class Garden(Fenced, Base):
        __tablename__ = "garden"
        __fence_column__ = "row_fence"
        id: Mapped[int] = mapped_column(primary_key=True)
        fence: Mapped[str]  # type: ignore[assignment] # of wood

    assert fence_column(Garden.__table__) is Garden.__table__.c.row_fence
    assert isinstance(Garden.__table__.c.fence.type, String)
    assert select(Garden.row_fence) is not None  # type: ignore[attr-defined] # named by a string


def test_the_mixin_may_stand_on_either_side_of_the_base() -> None:
    class Behind(Base, Fenced):
        __tablename__ = "behind"
        id: Mapped[int] = mapped_column(primary_key=True)

    assert fence_column(Behind.__table__) is not None


def test_a_child_of_joined_inheritance_has_the_fence_of_its_base() -> None:
    class Animal(Fenced, Base):
        __tablename__ = "animal"
        __fence_resource__ = "animal:{id}"
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "animal"}  # noqa: RUF012 SQLAlchemy's

    class Dog(Animal):
        __tablename__ = "dog"
        id: Mapped[int] = mapped_column(ForeignKey("animal.id"), primary_key=True)
        __mapper_args__ = {"polymorphic_identity": "dog"}  # noqa: RUF012 SQLAlchemy's

    class Cat(Animal):
        __mapper_args__ = {"polymorphic_identity": "cat"}  # noqa: RUF012 SQLAlchemy's

    assert fence_column(Dog.__table__) is None
    assert Dog.fence.property.columns == [Animal.__table__.c.fence]
    assert fence_column(Cat.__table__) is Animal.__table__.c.fence


@pytest.mark.parametrize("mixin", [Fenced, FencedDataclass])
def test_the_fence_of_a_dataclass_is_no_field_of_it(mixin: type[Fenced]) -> None:
    class DataBase(MappedAsDataclass, DeclarativeBase):
        pass

    class Doc(mixin, DataBase):  # type: ignore[misc, valid-type] # of two kinds
        __tablename__ = "doc"
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="")

    doc: Any = Doc(id=1)  # type: ignore[call-arg] # a dataclass
    assert [field.name for field in fields(doc)] == ["id", "title"]
    assert doc == Doc(id=1)  # type: ignore[call-arg] # a dataclass
    assert fence_column(Doc.__table__) is not None


def test_a_core_table_is_fenced_by_a_marked_column() -> None:
    fence = new_fence_column(resource="doc:{id}", level="reject")
    table = Table("doc", MetaData(), Column("id", Integer, primary_key=True), fence)
    assert fence_column(table) is fence
    assert fence_column(table.to_metadata(MetaData())).info[FENCE]["level"] == "reject"  # type: ignore[union-attr]


def test_a_model_over_a_core_table_with_a_fence_uses_that() -> None:
    class Own(DeclarativeBase):
        pass

    table = Table("doc", Own.metadata, Column("id", Integer, primary_key=True), new_fence_column("f"))

    class Doc(Fenced, Own):
        __table__ = table
        __fence_resource__ = "doc:{id}"

    assert fence_column(Doc.__table__) is table.c.f
    assert table.c.f.info[FENCE]["resource"] == "doc:{id}"


def test_a_table_without_a_fence_has_no_fence_column() -> None:
    assert fence_column(Table("doc", MetaData(), Column("fence", BigInteger))) is None


class Trimmed(TypeDecorator[str]):
    impl = Text
    cache_ok = True


@pytest.mark.parametrize("kind", [Integer, BigInteger, Text, String(9), Uuid, Trimmed])
def test_fields_may_be_int_str_and_uuid_columns(kind: Any) -> None:
    doc = model(__fence_resource__="doc:{part}", part=Column(kind))
    assert fence_column(doc.__table__) is not None


@pytest.mark.parametrize(
    "kind", [Numeric, DateTime, CHAR(3), CITEXT, Enum("a", "b", name="ab"), Uuid(native_uuid=False)]
)
def test_fields_of_other_types_are_refused_where_they_are_declared(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"doc:\{part\}.*'part'"):
        model(__fence_resource__="doc:{part}", part=Column(kind))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"__fence_resource__": "doc:{nosuch}"}, "nosuch"),
        ({"__fence_resource__": "doc:{id"}, "unmatched"),
        ({"__fence_resource__": ""}, "bytes"),
        ({"__fence_resource__": "doc:{twice}", "twice": Column(Integer, Computed("id * 2"))}, "generated"),
        ({"__fence_level__": "strict"}, "strict"),
        ({"__fence_level__": "column"}, "levels are reject and enforce in this version, not 'column'"),
        ({"__fence_level__": "observe"}, "levels are reject and enforce in this version, not 'observe'"),
        ({"fence": Column(Integer)}, "__fence_column__"),
        ({"fence": property(lambda _: 1)}, "__fence_column__"),
    ],
)
def test_a_declaration_that_cannot_be_meant_is_refused(body: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        model(**body)


@pytest.mark.parametrize("resource", ["payroll", ANY_RESOURCE, "doc:{id}", "{{x}}"])
@pytest.mark.parametrize("level", ["reject", "enforce", None])
def test_every_resource_and_level_of_the_surface_can_be_declared(resource: str, level: str | None) -> None:
    doc = model(__fence_resource__=resource, __fence_level__=level)
    assert fence_column(doc.__table__).info[FENCE] == {"resource": resource, "level": level}  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "arguments"), [("x", {"level": "strict"}), ("x", {"resource": "{"})])
def test_a_core_declaration_that_cannot_be_meant_is_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"strict|unmatched"):
        new_fence_column(name, **arguments)


@pytest.mark.parametrize(
    "indexed",
    [lambda: Index("ix", "id", "fence"), lambda: UniqueConstraint("id", "fence", name="uq")],
    ids=["index", "unique"],
)
def test_an_index_over_the_fence_is_refused(indexed: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="HOT"):
        Table("doc", MetaData(), Column("id", Integer, primary_key=True), new_fence_column(), indexed())


def test_an_index_over_other_columns_is_none_of_ours() -> None:
    Table("doc", MetaData(), Column("id", Integer, primary_key=True), new_fence_column(), Index("ix", "id"))


def test_the_attribute_shows_what_the_trigger_stamped(attached: Engine, holds: Holds, bank: Bank) -> None:
    holds.grants = [claimed(bank, 7), claimed(bank, 7, "account:99")]
    with Session(attached, expire_on_commit=False) as session:
        account, new = session.get_one(Account, 42), Account(id=99, balance=5)
        session.add(new)
        account.balance = 1
        session.commit()
    assert (account.fence, new.fence) == (7, 7)


def test_the_attribute_of_a_row_that_is_not_announced_stays_as_it_was_read(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    bank.execute("select fenceguard.drop_fence('account')")
    bank.execute("select fenceguard.add_fence('account', 'account:{id}', 'reject')")
    bank.execute("update account set fence = 3")
    with Session(attached, expire_on_commit=False) as session:
        account = session.get_one(Account, 42)
        account.balance = 1
        session.commit()
        holds.grants = [claimed(bank, 7, "account:43")]
    assert account.fence == 3
    assert bank.execute("select fence from account where id = 42").fetchone() == (3,)


def test_the_attribute_of_a_row_that_was_not_written_stays_as_it_was_read(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    holds.grants = [claimed(bank, 7)]
    with Session(attached, expire_on_commit=False) as session:
        account = session.get_one(Account, 42)
        account.balance += 1
        account.balance -= 1
        assert account in session.dirty
        session.commit()
    assert account.fence == 0


def test_a_row_of_any_resource_is_not_stamped(attached: Engine, holds: Holds, bank: Bank) -> None:
    doc = model(__fence_resource__=ANY_RESOURCE, __fence_level__="enforce", size=Column(Integer))
    bank.execute("create table doc (id int primary key, size int)")
    bank.execute("insert into doc values (1, 0)")
    bank.execute("select fenceguard.add_fence('doc', '*', 'enforce')")
    holds.grants = [claimed(bank, 7)]
    with Session(attached, expire_on_commit=False) as session:
        row = session.get_one(doc, 1)
        row.size = 5
        session.commit()
    assert row.fence == 0
    assert bank.execute("select size, fence from doc").fetchone() == (5, 0)


def test_the_orm_never_writes_the_fence_by_itself(attached: Engine, holds: Holds, bank: Bank) -> None:
    holds.grants = [claimed(bank, 7)]
    sent: list[str] = []
    with Session(attached) as session:
        session.get_one(Account, 42).balance = 1
        event.listen(attached, "before_cursor_execute", lambda *told: sent.append(told[2]))
        session.commit()
    assert [statement for statement in sent if statement.startswith("UPDATE")]
    assert not [statement for statement in sent if "fence" in statement]


def test_the_text_of_a_uuid_field_is_the_same_in_python_and_in_postgres(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    class Own(DeclarativeBase):
        pass

    class Doc(Fenced, Own):
        __tablename__ = "doc"
        __fence_resource__ = "doc:{id}:{part}"
        __fence_level__ = "enforce"
        id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
        part: Mapped[str]
        size: Mapped[Decimal]

    bank.execute("create table doc (id uuid primary key, part text, size numeric)")
    bank.execute("select fenceguard.add_fence('doc', 'doc:{id}:{part}', 'enforce')")
    key = uuid.UUID("0000ABCD-0000-0000-0000-00000000000F")
    holds.grants = [claimed(bank, 7, f"doc:{key}:é")]
    with Session(attached, expire_on_commit=False) as session:
        doc = Doc(id=key, part="é", size=Decimal("1.50"))
        session.add(doc)
        session.commit()
        holds.grants = [claimed(bank, 9, f"doc:{key}:é")]
        doc.size = Decimal(2)
        session.commit()
    assert doc.fence == 9
