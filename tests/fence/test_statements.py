"""`conditional` and `execute_conditional`: row by row, on a table without triggers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import psycopg
import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    ForeignKey,
    Index,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    bindparam,
    delete,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from support.bank import Account
from support.sql import until_waiting

from fenceguard import ANY_RESOURCE, Claim, Fenced, Grant, SchemaMissing, StaleToken
from fenceguard.fence import conditional, execute_conditional, new_fence_column

Bank = psycopg.Connection[Any]
By: TypeAlias = Claim | Grant | int


class Base(DeclarativeBase):
    pass


class Doc(Fenced, Base):
    __tablename__ = "doc"
    __fence_resource__ = "doc:{id}"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    slug: Mapped[str] = mapped_column(unique=True)
    body: Mapped[str]


DRIVERS = ("psycopg", "asyncpg")  # async psycopg sends what psycopg sends

DOC: Any = Doc.__table__

CLAIM = Claim("doc:1", 7, "a")
GRANT = Grant("doc:1", "a", 7, 30.0, 0.0)
BOTH: list[By] = [CLAIM, 7]


@pytest.fixture
def docs(pg: Callable[..., Bank]) -> Bank:
    """Rows 1 (fence 0), 2 (fence 7), 3 (fence 9) and 4 (fence NULL: the column was added by hand), no trigger."""
    bank = pg()
    bank.execute("create table doc (id bigint primary key, slug text unique, body text not null, fence bigint)")
    bank.execute("create table plain_doc (id bigint primary key, body text not null)")
    for table, columns in (("doc", "id, slug, body, fence"), ("plain_doc", "id, body")):
        bank.execute(
            f"insert into {table} select {columns} from (values (1, 'one', '', 0), (2, 'two', '', 7), "
            "(3, 'three', 'newer', 9), (4, 'four', '', null)) v (id, slug, body, fence)"
        )
    return bank


def rows(bank: Bank) -> dict[int, tuple[str, int | None]]:
    return {key: (body, fence) for key, body, fence in bank.execute("select id, body, fence from doc order by id")}


BEFORE = {1: ("", 0), 2: ("", 7), 3: ("newer", 9), 4: ("", None)}


def compiled(statement: Any) -> str:
    return str(statement.compile(dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True}))  # type: ignore[no-untyped-call]


# -- what the statement says


@pytest.mark.parametrize(
    ("by", "allowed"), [(7, "doc.fence < 7"), (GRANT, "doc.fence < 7"), (CLAIM, "doc.fence <= 7")]
)
def test_an_update_gets_condition_and_stamp(by: By, allowed: str) -> None:
    said = compiled(conditional(update(DOC).where(DOC.c.id == 1).values(body="x"), by))
    assert said == f"UPDATE doc SET body='x', fence=7 WHERE doc.id = 1 AND ({allowed} OR doc.fence IS NULL)"


def test_a_delete_gets_the_condition() -> None:
    said = compiled(conditional(delete(DOC).where(DOC.c.id == 1), 7))
    assert said == "DELETE FROM doc WHERE doc.id = 1 AND (doc.fence < 7 OR doc.fence IS NULL)"


def test_an_upsert_gets_condition_and_stamp_beside_those_of_the_user() -> None:
    statement = upsert(DOC).values(id=1, slug="s", body="x")
    said = compiled(
        conditional(
            statement.on_conflict_do_update(index_elements=["id"], set_={"body": "x"}, where=DOC.c.slug == "s"),
            CLAIM,
        )
    )
    assert said == (
        "INSERT INTO doc (id, slug, body, fence) VALUES (1, 's', 'x', 7) "
        "ON CONFLICT (id) DO UPDATE SET body = 'x', fence = 7 "
        "WHERE doc.slug = 's' AND (doc.fence <= 7 OR doc.fence IS NULL)"
    )


def test_every_row_of_an_upsert_is_stamped() -> None:
    statement = upsert(DOC).values([{"id": 1, "slug": "s", "body": "x"}, {"id": 2, "slug": "t", "body": "y"}])
    said = compiled(conditional(statement.on_conflict_do_update(index_elements=["id"], set_={"body": "z"}), 7))
    assert "VALUES (1, 's', 'x', 7), (2, 't', 'y', 7)" in said


def test_the_statement_that_was_given_stays_as_it_was() -> None:
    given = [
        update(DOC).values(body="x"),
        upsert(DOC).values(id=1).on_conflict_do_update(index_elements=["id"], set_={"body": "x"}),
        upsert(DOC).values([{"id": 1}]).on_conflict_do_update(index_elements=["id"], set_={"body": "x"}),
    ]
    said = [compiled(statement) for statement in given]
    made = [conditional(statement, 7) for statement in given]
    assert [compiled(statement) for statement in given] == said
    assert [type(statement) for statement in made] == [type(statement) for statement in given]


def test_the_fence_column_may_have_another_name() -> None:
    table = Table("t", MetaData(), Column("id", BigInteger, primary_key=True), new_fence_column("row_fence"))
    said = compiled(conditional(update(table).values(id=2), 7))
    assert said == "UPDATE t SET id=2, row_fence=7 WHERE t.row_fence < 7 OR t.row_fence IS NULL"


@pytest.mark.parametrize("statement", [select(DOC), text("update doc set body = ''"), "update doc", None])
def test_another_kind_of_statement_is_refused_with_the_remedy(statement: Any) -> None:
    with pytest.raises(TypeError, match="enter"):
        conditional(statement, 7)


@pytest.mark.parametrize(
    "statement",
    [
        insert(DOC).values(id=1),
        upsert(DOC).values(id=1),
        upsert(DOC).values(id=1).on_conflict_do_nothing(),
        upsert(DOC)
        .from_select(["id"], select(DOC.c.id))
        .on_conflict_do_update(index_elements=["id"], set_={"body": "x"}),
    ],
    ids=["insert", "no conflict clause", "do nothing", "from select"],
)
def test_an_insert_that_no_row_fence_can_guard_is_refused_with_the_remedy(statement: Any) -> None:
    with pytest.raises(ValueError, match="enter"):
        conditional(statement, 7)


def test_a_table_without_a_fence_names_the_operation() -> None:
    table = Table("t", MetaData(), Column("id", BigInteger, primary_key=True), schema="s")
    with pytest.raises(SchemaMissing, match=r"op\.add_fence\('s\.t'"):
        conditional(update(table).values(id=2), 7)


@pytest.mark.parametrize(
    ("token", "error"), [(0, ValueError), (2**53, ValueError), (True, TypeError), ("7", TypeError)]
)
def test_what_is_no_token_is_refused(token: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="token"):
        conditional(update(DOC), token)


# -- one row


def write(key: int) -> Any:
    return update(DOC).where(DOC.c.id == key).values(body="x")


def upsert_of(key: int) -> Any:
    statement = upsert(DOC).values(id=key, slug=f"new{key}", body="x")
    return statement.on_conflict_do_update(index_elements=["id"], set_={"body": "x"})


def remove(key: int) -> Any:
    return delete(DOC).where(DOC.c.id == key)


ONE_ROW = pytest.mark.parametrize("make", [write, upsert_of, remove])


@ONE_ROW
@pytest.mark.parametrize("by", BOTH)
def test_a_row_with_a_smaller_fence_is_written(any_engine: Engine, docs: Bank, make: Any, by: By) -> None:
    with any_engine.begin() as connection:
        assert execute_conditional(connection, make(1), by) == 1
    assert rows(docs).get(1) == (None if make is remove else ("x", 7))


@ONE_ROW
@pytest.mark.parametrize("by", BOTH)
def test_a_row_with_a_larger_fence_is_refused_and_named_and_lands_without_the_condition(
    any_engine: Engine, docs: Bank, make: Any, by: By
) -> None:
    with any_engine.connect() as connection, pytest.raises(StaleToken) as caught:
        execute_conditional(connection, make(3), by)
    refused = caught.value
    assert (refused.token, refused.newest, refused.table, refused.key) == (7, 9, "public.doc", {"id": 3})
    assert refused.resource == ("doc:1" if by is CLAIM else "doc:3")
    assert rows(docs) == BEFORE
    with any_engine.begin() as control:
        control.execute(make(3))
    assert rows(docs).get(3) == (None if make is remove else ("x", 9))


@ONE_ROW
@pytest.mark.parametrize(("by", "written"), [(CLAIM, 1), (GRANT, 0), (7, 0)])
def test_a_row_of_this_very_token_is_written_again_by_a_claim_only(
    any_engine: Engine, docs: Bank, make: Any, by: By, written: int
) -> None:
    with any_engine.begin() as connection:
        assert execute_conditional(connection, make(2), by) == written
    assert (rows(docs).get(2) == ("", 7)) is (written == 0)


@pytest.mark.parametrize("make", [write, remove])
@pytest.mark.parametrize("by", BOTH)
def test_no_such_row_is_0(any_engine: Engine, docs: Bank, make: Any, by: By) -> None:
    with any_engine.begin() as connection:
        assert execute_conditional(connection, make(99), by) == 0
    assert rows(docs) == BEFORE


def test_an_upsert_of_a_new_row_inserts_and_stamps(any_engine: Engine, docs: Bank) -> None:
    with any_engine.begin() as connection:
        assert execute_conditional(connection, upsert_of(99), 7) == 1
    assert rows(docs)[99] == ("x", 7)


@pytest.mark.case(
    "case 29: NULL row fence", control="test_control_a_plain_comparison_leaves_a_null_fence_unwritable"
)
@ONE_ROW
@pytest.mark.parametrize("by", BOTH)
def test_a_row_whose_fence_is_null_is_written_and_has_one_afterwards(
    any_engine: Engine, docs: Bank, make: Any, by: By
) -> None:
    with any_engine.begin() as connection:
        assert execute_conditional(connection, make(4), by) == 1
    assert rows(docs).get(4) == (None if make is remove else ("x", 7))
    if make is not remove:
        with any_engine.connect() as connection, pytest.raises(StaleToken):
            execute_conditional(connection, make(4), 6)


def test_control_a_plain_comparison_leaves_a_null_fence_unwritable(docs: Bank) -> None:
    assert docs.execute("update doc set body = 'x', fence = 7 where id = 4 and fence < 7").rowcount == 0


def test_the_second_write_of_a_claim_s_holder_lands_and_the_second_of_a_bare_token_does_not(
    any_engine: Engine, docs: Bank
) -> None:
    with any_engine.begin() as connection:
        counts = [execute_conditional(connection, write(1), by) for by in (7, 7, CLAIM, CLAIM)]
    assert counts == [1, 0, 1, 1]
    assert rows(docs)[1] == ("x", 7)


def test_a_row_that_the_statement_does_not_touch_raises_nothing(any_engine: Engine, docs: Bank) -> None:
    with any_engine.begin() as connection:
        assert execute_conditional(connection, write(3).where(DOC.c.slug == "else"), 7) == 0
    assert rows(docs) == BEFORE


def test_one_row_can_be_written_in_autocommit(any_engine: Engine, docs: Bank) -> None:
    with any_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        assert execute_conditional(connection, write(1), 7) == 1
        with pytest.raises(StaleToken):
            execute_conditional(connection, write(3), 7)
    assert rows(docs) == {**BEFORE, 1: ("x", 7)}


def test_a_write_that_waited_for_a_newer_one_is_refused(
    engine: Engine, docs: Bank, pg: Callable[..., Bank]
) -> None:
    """Its own snapshot saw the old fence; what the server compares, and what is then read, is the new one."""
    caught: list[StaleToken] = []
    with engine.connect() as connection:
        waiter: Any = connection.connection.driver_connection

        def stale() -> None:
            with pytest.raises(StaleToken) as info:
                execute_conditional(connection, write(1), 7)
            caught.append(info.value)

        with docs.transaction():
            docs.execute("update doc set body = 'newer', fence = 9 where id = 1")
            thread = threading.Thread(target=stale)
            thread.start()
            until_waiting(pg(), waiter)
        thread.join(20)
    assert [refused.newest for refused in caught] == [9]
    assert rows(docs)[1] == ("newer", 9)


# -- several rows


@pytest.mark.case(
    "a set-based statement skips stale rows",
    control="test_control_conditional_alone_writes_some_and_quietly_skips_the_others",
)
@pytest.mark.parametrize("by", BOTH)
@pytest.mark.parametrize("statement", [update(DOC).values(body="x"), delete(DOC)], ids=["update", "delete"])
def test_of_several_rows_one_refused_refuses_all(any_engine: Engine, docs: Bank, statement: Any, by: By) -> None:
    with any_engine.begin() as connection:
        connection.execute(text("insert into plain_doc values (9, 'kept')"))
        with pytest.raises(StaleToken) as caught:
            execute_conditional(connection, statement, by)
        assert connection.scalar(text("select count(*) from plain_doc")) == 5
    assert (caught.value.newest, caught.value.key) == (9, {"id": 3})
    assert rows(docs) == BEFORE


def test_of_several_refused_rows_the_newest_is_named_without_a_key(any_engine: Engine, docs: Bank) -> None:
    with any_engine.connect() as connection, pytest.raises(StaleToken) as caught:
        execute_conditional(connection, update(DOC).values(body="x"), 6)
    assert (caught.value.resource, caught.value.newest, caught.value.key) == ("doc:3", 9, None)
    assert rows(docs) == BEFORE


def test_control_conditional_alone_writes_some_and_quietly_skips_the_others(any_engine: Engine, docs: Bank) -> None:
    with any_engine.begin() as connection:
        connection.execute(conditional(update(DOC).values(body="x"), 7))
    assert {key for key, (body, _) in rows(docs).items() if body == "x"} == {1, 4}


def test_several_rows_that_may_be_written_are_counted(any_engine: Engine, docs: Bank) -> None:
    with any_engine.begin() as connection:
        assert execute_conditional(connection, update(DOC).where(DOC.c.id != 3).values(body="x"), CLAIM) == 3
    assert rows(docs) == {1: ("x", 7), 2: ("x", 7), 3: ("newer", 9), 4: ("x", 7)}


def test_several_rows_in_autocommit_are_refused_before_anything_is_written(any_engine: Engine, docs: Bank) -> None:
    with (
        any_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(ValueError, match="AUTOCOMMIT"),
    ):
        execute_conditional(connection, update(DOC).values(body="x"), 7)
    assert rows(docs) == BEFORE


def test_an_upsert_of_several_rows_refuses_all_when_one_is_refused(any_engine: Engine, docs: Bank) -> None:
    values = [{"id": key, "slug": f"s{key}", "body": "x"} for key in (1, 3, 99)]
    statement = upsert(DOC).values(values)
    statement = statement.on_conflict_do_update(index_elements=[DOC.c.id], set_={"body": statement.excluded.body})
    with any_engine.connect() as connection, pytest.raises(StaleToken) as caught:
        execute_conditional(connection, statement, 7)
    assert caught.value.key == {"id": 3}
    assert rows(docs) == BEFORE


def test_an_upsert_of_several_rows_counts_what_it_inserted_and_updated(any_engine: Engine, docs: Bank) -> None:
    statement = upsert(DOC).values([(1, "s1", "x"), (99, "s99", "x")])
    statement = statement.on_conflict_do_update(index_elements=["id"], set_={"body": "x"})
    with any_engine.begin() as connection:
        assert execute_conditional(connection, statement, 7) == 2
    assert (rows(docs)[1], rows(docs)[99]) == (("x", 7), ("x", 7))


def test_a_row_joined_from_another_table_is_found(any_engine: Engine, docs: Bank) -> None:
    other = Table("plain_doc", MetaData(), Column("id", BigInteger, primary_key=True), Column("body", Text))
    joined = update(DOC).where(DOC.c.id == other.c.id, other.c.body == "newer").values(body="x")
    with any_engine.connect() as connection, pytest.raises(StaleToken) as caught:
        execute_conditional(connection, joined, 7)
    assert caught.value.key == {"id": 3}
    assert rows(docs) == BEFORE


# -- upserts: which row is in the way


@pytest.mark.parametrize(
    "target", [{"constraint": "uq_slug"}, {"index_elements": ["slug"]}, {"constraint": "ix_slug"}]
)
def test_the_row_in_the_way_is_found_by_any_unique_key(
    any_engine: Engine, docs: Bank, target: dict[str, Any]
) -> None:
    docs.execute("alter table doc drop constraint doc_slug_key, add constraint uq_slug unique (slug)")
    docs.execute("create unique index ix_slug_index on doc (slug)")
    if target == {"constraint": "ix_slug"}:
        docs.execute("alter table doc add constraint ix_slug unique using index ix_slug_index")
    table = Table(
        "doc",
        MetaData(),
        Column("id", BigInteger, primary_key=True),
        Column("slug", Text),
        Column("body", Text),
        new_fence_column(resource=ANY_RESOURCE),
        UniqueConstraint("slug", name="uq_slug"),
        Index("ix_slug", "slug", unique=True),
    )
    statement = upsert(table).values(id=99, slug="three", body="x")
    with any_engine.connect() as connection, pytest.raises(StaleToken) as caught:
        execute_conditional(connection, statement.on_conflict_do_update(set_={"body": "x"}, **target), 7)
    assert (caught.value.key, caught.value.resource) == ({"id": 3}, "doc")


@pytest.mark.parametrize(("body", "outcome"), [("other", "stale"), ("newer", 0)])
def test_a_row_that_the_upsert_s_own_condition_leaves_alone_raises_nothing(
    any_engine: Engine, docs: Bank, body: str, outcome: str | int
) -> None:
    statement = upsert(DOC).values(id=3, slug="s", body=body)
    statement = statement.on_conflict_do_update(
        index_elements=["id"], set_={"body": body}, where=DOC.c.body != statement.excluded.body
    )
    assert outcome_of(any_engine, statement) == outcome
    assert rows(docs) == BEFORE


def outcome_of(engine: Engine, statement: Any) -> str | int:
    with engine.begin() as connection:
        try:
            return execute_conditional(connection, statement, 7)
        except StaleToken:
            return "stale"


def test_a_partial_unique_index_is_found_with_its_condition(any_engine: Engine, docs: Bank) -> None:
    docs.execute("create unique index live on doc (body) where id > 2")
    docs.execute("update doc set body = id::text, fence = 9 where id in (1, 2, 4)")
    statement = upsert(DOC).values(id=99, slug="s", body="newer")
    statement = statement.on_conflict_do_update(
        index_elements=["body"], index_where=DOC.c.id > 2, set_={"slug": "taken"}
    )
    with any_engine.connect() as connection, pytest.raises(StaleToken) as caught:
        execute_conditional(connection, statement, 7)
    assert caught.value.key == {"id": 3}


def test_a_condition_on_a_default_of_the_database_counts_as_met(any_engine: Engine, docs: Bank) -> None:
    docs.execute("alter table doc alter body set default 'fresh'")
    statement = upsert(DOC).values(id=3, slug="s")
    statement = statement.on_conflict_do_update(
        index_elements=["id"], set_={"slug": "x"}, where=DOC.c.body != statement.excluded.body
    )
    assert outcome_of(any_engine, statement) == "stale"


@pytest.mark.parametrize(
    "statement",
    [
        upsert(DOC).values(slug="s", body="x").on_conflict_do_update(index_elements=["id"], set_={"body": "x"}),
        upsert(DOC).values(id=1, body="x").on_conflict_do_update(constraint="nosuch", set_={"body": "x"}),
        upsert(DOC)
        .values(id=1, body="x")
        .on_conflict_do_update(index_elements=[func.lower(DOC.c.body)], set_={"body": "x"}),
        upsert(DOC).on_conflict_do_update(index_elements=["id"], set_={"body": "x"}),
    ],
    ids=["key not given", "unknown constraint", "expression", "no values"],
)
def test_an_upsert_whose_row_in_the_way_cannot_be_told_is_refused_before_it_runs(
    engine: Engine, docs: Bank, statement: Any
) -> None:
    with engine.connect() as connection, pytest.raises(ValueError, match="execute_conditional"):
        execute_conditional(connection, statement, 7)
    assert rows(docs) == BEFORE


@pytest.mark.case("case 26: the driver reports -1 rows", control="inside")
@pytest.mark.parametrize("any_engine", ["asyncpg"], indirect=True)
def test_rows_are_counted_where_the_driver_says_minus_one(any_engine: Engine, docs: Bank) -> None:
    fresh, stale = update(DOC).where(DOC.c.id.in_([1, 4])), update(DOC).where(DOC.c.id.in_([1, 3]))
    by_key = conditional(update(DOC).where(DOC.c.id == bindparam("key")).values(body="x"), 7)
    with any_engine.begin() as connection:
        told_of_fresh = connection.execute(by_key, [{"key": 1}, {"key": 4}]).rowcount
        told_of_stale = connection.execute(by_key, [{"key": 3}, {"key": 3}]).rowcount
        assert (told_of_fresh, told_of_stale) == (-1, -1)
        assert execute_conditional(connection, fresh.values(body="y"), CLAIM) == 2
        with pytest.raises(StaleToken):
            execute_conditional(connection, stale.values(body="y"), CLAIM)
    assert rows(docs) == {**BEFORE, 1: ("y", 7), 4: ("y", 7)}


def test_conditional_alone_takes_the_rows_of_an_upsert_as_parameters(any_engine: Engine, docs: Bank) -> None:
    statement = conditional(upsert(DOC).on_conflict_do_update(index_elements=["id"], set_={"body": "x"}), 7)
    with any_engine.begin() as connection:
        connection.execute(statement, [{"id": key, "slug": f"s{key}", "body": "y"} for key in (1, 3, 99)])
    assert rows(docs) == {**BEFORE, 1: ("x", 7), 99: ("y", 7)}


def test_conditional_alone_takes_the_keys_of_an_update_as_parameters(any_engine: Engine, docs: Bank) -> None:
    statement = conditional(update(DOC).where(DOC.c.id == bindparam("key")).values(body="x"), CLAIM)
    with any_engine.begin() as connection:
        connection.execute(statement, [{"key": key} for key in (1, 2, 3)])
    assert rows(docs) == {**BEFORE, 1: ("x", 7), 2: ("x", 7)}


def test_another_refusal_of_the_server_stays_the_driver_s_error(any_engine: Engine, docs: Bank) -> None:
    with any_engine.connect() as connection, pytest.raises(DBAPIError) as caught:
        execute_conditional(connection, update(DOC).where(DOC.c.id == 1).values(slug="two"), 7)
    assert caught.value.orig.sqlstate == "23505"  # type: ignore[union-attr]
    assert rows(docs) == BEFORE


def test_a_row_that_names_no_resource_is_refused_under_the_name_of_its_table(
    any_engine: Engine, docs: Bank
) -> None:
    docs.execute("update doc set slug = 'a/b' where id = 3")
    table = Table(
        "doc",
        MetaData(),
        Column("id", BigInteger, primary_key=True),
        Column("slug", Text),
        Column("body", Text),
        new_fence_column(resource="{slug}/{body}"),
    )
    with any_engine.connect() as connection, pytest.raises(StaleToken) as caught:
        execute_conditional(connection, update(table).where(table.c.id == 3).values(body="x"), 7)
    assert caught.value.resource == "doc"


def test_a_statement_with_returning_is_refused(engine: Engine, docs: Bank) -> None:
    with engine.connect() as connection, pytest.raises(ValueError, match="returning"):
        execute_conditional(connection, write(1).returning(DOC.c.id), 7)
    assert rows(docs) == BEFORE


# -- sessions


def test_a_session_keeps_what_it_has_in_memory_in_step(any_engine: Engine, docs: Bank) -> None:
    with Session(any_engine) as session:
        one, three = session.get_one(Doc, 1), session.get_one(Doc, 3)
        docs.execute("update doc set body = 'newest', fence = 11 where id = 3")
        assert execute_conditional(session, update(Doc).where(Doc.id == 1).values(body="x"), 8) == 1
        assert (one.body, one.fence) == ("x", 8)
        with pytest.raises(StaleToken):
            execute_conditional(session, update(Doc).where(Doc.id == 3).values(body="x"), 10)
        assert three.body == "newer"
        session.commit()
    assert rows(docs) == {**BEFORE, 1: ("x", 8), 3: ("newest", 11)}


def test_memory_is_never_changed_by_a_condition_on_the_fences_in_it(engine: Engine, docs: Bank) -> None:
    statement = update(Doc).where(Doc.id == 1).values(body="x").execution_options(synchronize_session="evaluate")
    with Session(engine) as session, pytest.raises(InvalidRequestError, match="evaluate"):
        session.execute(conditional(statement, 7))
    assert rows(docs) == BEFORE


def test_a_session_whose_several_rows_are_refused_has_them_back_in_memory(any_engine: Engine, docs: Bank) -> None:
    with Session(any_engine) as session:
        one = session.get_one(Doc, 1)
        with pytest.raises(StaleToken):
            execute_conditional(session, update(Doc).values(body="x"), 7)
        assert (one.body, one.fence) == ("", 0)
    assert rows(docs) == BEFORE


def test_a_session_upserts_and_deletes_mapped_rows(any_engine: Engine, docs: Bank) -> None:
    statement = upsert(Doc).values(id=1, slug="s", body="x")
    with Session(any_engine) as session, session.begin():
        done = execute_conditional(
            session, statement.on_conflict_do_update(index_elements=["id"], set_={"body": "x"}), 7
        )
        gone = execute_conditional(session, delete(Doc).where(Doc.id == 2), CLAIM)
    assert (done, gone) == (1, 1)
    assert rows(docs) == {1: ("x", 7), 3: BEFORE[3], 4: BEFORE[4]}


def test_a_child_of_joined_inheritance_without_a_fence_of_its_own_is_refused(engine: Engine) -> None:
    class Note(Doc):
        __tablename__ = "note"
        id: Mapped[int] = mapped_column(ForeignKey("doc.id"), primary_key=True)
        tone: Mapped[str]

    with Session(engine) as session, pytest.raises(SchemaMissing, match="note"):
        execute_conditional(session, update(Note).values(tone="x"), 7)


async def test_async_sessions_and_connections_run_it_in_sync(async_engine: AsyncEngine, docs: Bank) -> None:
    async with AsyncSession(async_engine) as session, session.begin():
        assert await session.run_sync(execute_conditional, write(1), 7) == 1
    async with async_engine.begin() as connection:
        assert await connection.run_sync(execute_conditional, write(1), CLAIM) == 1
    assert rows(docs)[1] == ("x", 7)


# -- beside triggers


def test_on_an_enforced_table_the_trigger_refuses_and_conditional_passes_it_on(
    any_engine: Engine, bank: Bank
) -> None:
    statement = update(Account).where(Account.id == 42).values(balance=1)
    with any_engine.connect() as connection, pytest.raises(DBAPIError) as unannounced:
        connection.execute(conditional(statement, 7))
    assert unannounced.value.orig.sqlstate == "ZF002"  # type: ignore[union-attr]
    bank.execute("select fenceguard.claim('account:42', 8, 'newer')")
    with any_engine.connect() as connection:
        announce_by_hand(connection)
        with pytest.raises(StaleToken) as caught:
            execute_conditional(connection, statement, Claim("account:42", 7, "a"))
    assert caught.value.__cause__.sqlstate == "ZF001"  # type: ignore[union-attr]
    assert caught.value.newest == 8


def announce_by_hand(connection: Connection) -> None:
    connection.exec_driver_sql("""set local fenceguard.grants = '{"account:42": {"token": 7, "owner": "a"}}'""")


def test_an_async_session_is_told_how_to_execute_a_conditional_statement() -> None:
    with pytest.raises(TypeError, match="run_sync"):
        execute_conditional(AsyncSession(), update(Account).values(balance=1), 7)
