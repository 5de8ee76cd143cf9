"""fenceguard.add_fence and drop_fence: what they make, and the bad input they name before anything is changed."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql
from support.sql import (
    Connect,
    Connection,
    announce,
    claim,
    in_background,
    refusal,
    scalar,
    sqlstate,
    until_waiting,
    writing,
)

TRIGGERS = (
    "select tgrelid::regclass::text, tgname from pg_trigger where not tgisinternal and tgparentid = 0 order by 1, 2"
)


COLUMNS = """
    select attrelid::regclass::text, attname, atttypid, attnotnull
    from pg_attribute join pg_class c on c.oid = attrelid
    where attnum > 0 and c.relnamespace = 'public'::regnamespace and not attisdropped
    order by 1, 2
"""


def picture(connection: Connection) -> list[list[tuple[Any, ...]]]:
    """Return columns, triggers and generated functions of a database: what fencing may change."""
    return [
        connection.execute(query).fetchall()
        for query in (
            COLUMNS,
            TRIGGERS,
            "select proname from pg_proc where pronamespace = 'fenceguard'::regnamespace order by 1",
        )
    ]


def make(connection: Connection) -> None:
    connection.execute(
        "create table account (id int primary key, name text, half int generated always as (id / 2) stored)"
    )


def test_a_fence_is_a_column_two_guards_and_one_for_truncate(pg: Connect) -> None:
    connection = pg()
    make(connection)

    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")

    assert connection.execute("select * from fenceguard.fence_of('account')").fetchone() == (
        "enforce",
        "account:{id}",
        "fence",
    )
    triggers = connection.execute(TRIGGERS).fetchall()
    assert ("account", "fenceguard") in triggers
    assert ("account", "~fenceguard") in triggers
    assert ("account", "~fenceguard_truncate") in triggers
    column = connection.execute(
        "select format_type(atttypid, atttypmod), attnotnull, pg_get_expr(adbin, adrelid) from pg_attribute "
        "join pg_attrdef on adrelid = attrelid and adnum = attnum "
        "where attrelid = 'account'::regclass and attname = 'fence'"
    ).fetchone()
    assert column is not None
    assert column[:2] == ("bigint", True)
    assert column[2].strip("'").startswith("0")


def test_any_resource_needs_no_row_trigger_on_a_table_without_partitions(pg: Connect) -> None:
    connection = pg()
    make(connection)

    connection.execute("select fenceguard.add_fence('account', '*', 'enforce')")

    assert [name for table, name in connection.execute(TRIGGERS) if table == "account"] == ["fenceguard"]


def test_the_same_fence_again_changes_nothing_and_takes_no_lock(pg: Connect) -> None:
    connection, reader = pg(), pg()
    make(connection)
    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")
    before = picture(connection)
    connection.execute("set lock_timeout = '1s'")
    reader.execute("begin; lock table account in row exclusive mode")

    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")

    assert picture(connection) == before


@pytest.mark.parametrize(
    "arguments",
    [
        "'account:{id}', 'reject'",
        "'account:{name}', 'enforce'",
        "'*', 'enforce'",
        "'account:{id}', 'enforce', 'other'",
    ],
)
def test_another_fence_on_a_fenced_table_is_refused(pg: Connect, arguments: str) -> None:
    connection = pg()
    make(connection)
    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")
    before = picture(connection)

    error = refusal(connection, f"select fenceguard.add_fence('account', {arguments})")

    assert error is not None
    assert error.sqlstate == "42710"
    assert "level enforce" in str(error.diag.message_primary)
    assert picture(connection) == before


def test_a_column_that_is_there_is_taken_without_rewriting_it(pg: Connect) -> None:
    connection = pg()
    make(connection)
    connection.execute("alter table account add column token bigint not null default '0'")
    connection.execute("insert into account (id) values (1)")

    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce', 'token')")

    claim(connection, "account:1", 7)
    with writing(connection, ("account:1", 7)):
        connection.execute("update account set name = 'x'")
    assert connection.execute("select token from account").fetchall() == [(7,)]


@pytest.mark.parametrize(
    "column",
    [
        "integer not null default 0",
        "bigint default 0",
        "bigint not null",
        "bigint not null default 1",
        "bigint not null default 10",
        "bigint not null generated always as identity",
        "bigint not null generated always as (id * 0) stored",
        "text not null default '0'",
    ],
)
def test_a_column_of_another_shape_is_named(pg: Connect, column: str) -> None:
    connection = pg()
    make(connection)
    connection.execute(f"alter table account add column fence {column}")
    before = picture(connection)

    error = refusal(connection, "select fenceguard.add_fence('account', 'account:{id}', 'enforce')")

    assert error is not None
    assert error.sqlstate == "42804"
    assert "bigint not null default 0" in str(error.diag.message_hint)
    assert picture(connection) == before


@pytest.mark.parametrize(
    ("arguments", "state", "names"),
    [
        ("'account', 'account:{id}', null", "22023", "NULL"),
        ("'account', 'account:{id}', 'strict'", "22023", '"strict"'),
        ("'account', 'account:{id}', 'Enforce'", "22023", '"Enforce"'),
        ("'account', null, 'enforce'", "22023", "NULL"),
        ("'account', '', 'enforce'", "22023", '""'),
        ("'account', 'account:{id', 'enforce'", "22023", "unmatched"),
        ("'account', 'account:{}', 'enforce'", "22023", '"{}"'),
        ("'account', 'account:{a b}', 'enforce'", "22023", '"{a b}"'),
        ("'account', 'account:{a.b}', 'enforce'", "22023", '"{a.b}"'),
        ("'account', '{id}{name}', 'enforce'", "22023", "between two fields"),
        ("'account', e'tab\\t{id}', 'enforce'", "22023", "tab"),
        ("'account', repeat('x', 513), 'enforce'", "22023", "xxx"),
        ("'account', 'account:{number}', 'enforce'", "42703", '"number"'),
        ("'account', 'account:{ctid}', 'enforce'", "42703", '"ctid"'),
        ("'account', 'account:{ID}', 'enforce'", "42703", '"ID"'),
        ("'account', 'account:{half}', 'enforce'", "42804", "generated"),
        ("'account', 'account:{id}', 'enforce', 'id'", "22023", '"id"'),
        ("'account', 'account:{id}', 'enforce', 'name'", "42804", '"name"'),
        ("null, 'account:{id}', 'enforce'", "42P01", "NULL"),
        ("99999999::regclass, 'account:{id}', 'enforce'", "42P01", "99999999"),
        ("'nowhere', 'account:{id}', 'enforce'", "42P01", "nowhere"),
        ("'a_view', 'account:{id}', 'enforce'", "42809", "a_view"),
        ("'a_matview', 'account:{id}', 'enforce'", "42809", "a_matview"),
        ("'a_sequence', '*', 'enforce'", "42809", "a_sequence"),
        ("'fenceguard.fence', '*', 'enforce'", "42809", "fenceguard.fence"),
        ("'pg_class', '*', 'enforce'", "42809", "pg_class"),
        ("'entry_0', 'entry:{id}', 'enforce'", "42809", "partition"),
        ("'elder', '*', 'enforce'", "0A000", "heir"),
        ("'heir', '*', 'enforce'", "0A000", "heir"),
    ],
)
def test_bad_input_is_named_before_anything_is_changed(pg: Connect, arguments: str, state: str, names: str) -> None:
    connection = pg()
    make(connection)
    connection.execute("create view a_view as select * from account")
    connection.execute("create materialized view a_matview as select * from account")
    connection.execute("create sequence a_sequence")
    connection.execute("create table entry (id int) partition by range (id)")
    connection.execute("create table entry_0 partition of entry for values from (0) to (10)")
    connection.execute("create table elder (id int); create table heir () inherits (elder)")
    before = picture(connection)

    error = refusal(connection, f"select fenceguard.add_fence({arguments})")

    assert error is not None
    assert error.sqlstate == state
    assert names in str(error.diag.message_primary)
    assert error.diag.message_hint or state == "42P01"
    assert picture(connection) == before


def test_a_foreign_table_is_refused_alone_and_as_a_partition(pg: Connect) -> None:
    connection = pg()
    connection.execute("create foreign data wrapper nothing; create server elsewhere foreign data wrapper nothing")
    connection.execute("create foreign table far (id int) server elsewhere")
    connection.execute("create table entry (id int) partition by range (id)")
    connection.execute(
        "create foreign table entry_0 partition of entry for values from (0) to (10) server elsewhere"
    )

    assert sqlstate(connection, "select fenceguard.add_fence('far', '*', 'enforce')") == "42809"
    assert sqlstate(connection, "select fenceguard.add_fence('entry', '*', 'enforce')") == "0A000"


@pytest.mark.parametrize(
    "names",
    [
        ("sch ema", 'ta"ble', "fe nce", "id"),
        ("größe", "Tisch;--", "Zaun→", "größe"),
        ("S", "it's", "it's", "ID"),
        ("s$guard$", "t$function$", "%s", "_x1"),
        ("a.b", "c.d", "%I", "nummer"),
        ("s" * 63, "t" * 63, "c" * 63, "f" * 63),
    ],
)
def test_names_of_every_kind_can_be_fenced_and_unfenced(pg: Connect, names: tuple[str, str, str, str]) -> None:
    connection = pg()
    schema, table, column, field = map(sql.Identifier, names)
    whole = sql.SQL(".").join((schema, table))
    name = whole.as_string(connection)
    connection.execute(sql.SQL("create schema {}").format(schema))
    connection.execute(sql.SQL("create table {} ({} int primary key)").format(whole, field))

    connection.execute(
        "select fenceguard.add_fence(%s::regclass, %s, 'enforce', %s)", (name, f"r {{{names[3]}}}", names[2])
    )

    claim(connection, "r 1", 7)
    unannounced = refusal(connection, sql.SQL("truncate {}").format(whole).as_string(connection))
    with writing(connection, ("r 1", 7)):
        connection.execute(sql.SQL("insert into {} values (1)").format(whole))
        connection.execute(sql.SQL("truncate {}").format(whole))
        connection.execute(sql.SQL("insert into {} values (1)").format(whole))
    stamps = connection.execute(sql.SQL("select {} from {}").format(column, whole)).fetchall()
    connection.execute("select fenceguard.drop_fence(%s::regclass)", (name,))
    assert unannounced is not None
    assert unannounced.sqlstate == "ZF002"
    assert f'{{"table": "{names[0]}.{names[1]}"}}'.replace('ta"ble', 'ta\\"ble') == unannounced.diag.message_detail
    assert stamps == [(7,)]


def test_drop_takes_triggers_function_and_column(pg: Connect) -> None:
    connection = pg()
    make(connection)
    connection.execute("create table entry (id int) partition by range (id)")
    connection.execute("create table entry_0 partition of entry for values from (0) to (10)")
    before = picture(connection)
    for table in ("account", "entry"):
        connection.execute(f"select fenceguard.add_fence('{table}', '{table}:{{id}}', 'enforce')")
    fenced = picture(connection)

    for table in ("account", "entry"):
        connection.execute(f"select fenceguard.drop_fence('{table}')")

    assert fenced != before
    assert picture(connection) == before
    assert sqlstate(connection, "insert into account (id) values (1)") is None


def test_drop_serves_a_partition_that_was_detached_since(pg: Connect) -> None:
    connection = pg()
    connection.execute("create table entry (id int) partition by range (id)")
    connection.execute("create table entry_0 partition of entry for values from (0) to (10)")
    connection.execute("select fenceguard.add_fence('entry', 'entry:{id}', 'enforce')")
    connection.execute("alter table entry detach partition entry_0")

    connection.execute("select fenceguard.drop_fence('entry')")
    still = sqlstate(connection, "insert into entry_0 (id) values (1)")
    connection.execute("select fenceguard.drop_fence('entry_0')")

    assert still == "ZF002"
    assert sqlstate(connection, "insert into entry_0 (id) values (1)") is None


@pytest.mark.parametrize(("table", "state"), [("account", "42704"), ("entry_0", "42809"), ("nowhere", "42P01")])
def test_dropping_no_fence_is_refused(pg: Connect, table: str, state: str) -> None:
    connection = pg()
    make(connection)
    connection.execute("create table entry (id int) partition by range (id)")
    connection.execute("create table entry_0 partition of entry for values from (0) to (10)")
    connection.execute("select fenceguard.add_fence('entry', 'entry:{id}', 'enforce')")

    assert sqlstate(connection, f"select fenceguard.drop_fence('{table}')") == state


def test_a_table_dropped_with_its_fence_leaves_the_next_of_its_number_alone(pg: Connect) -> None:
    # After a restore another table may have the number that an orphaned row function is named after.
    connection = pg()
    make(connection)
    number = scalar(connection, "select 'account'::regclass::oid")
    connection.execute(f"create function fenceguard.guard_rows_{number}() returns int language sql as 'select 1'")

    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")

    assert scalar(connection, f"select fenceguard.guard_rows_{number}()") == 1
    assert sqlstate(connection, "insert into account (id) values (1)") == "ZF002"
    connection.execute("select fenceguard.drop_fence('account')")
    assert scalar(connection, f"select fenceguard.guard_rows_{number}()") == 1


def test_two_that_fence_one_table_at_once_make_one_fence(pg: Connect) -> None:
    connection, first, second = pg(), pg(), pg()
    make(connection)
    add = "select fenceguard.add_fence('account', 'account:{id}', 'enforce')"
    with in_background() as submit:
        first.execute("begin")
        first.execute(add)
        waiting = submit(sqlstate, second, add)
        until_waiting(connection, second)
        first.execute("commit")

        assert waiting.result() is None
    assert len([name for table, name in connection.execute(TRIGGERS) if table == "account"]) == 3


def test_writers_in_flight_are_waited_for_and_later_ones_are_fenced(pg: Connect) -> None:
    connection, writer, observer = pg(), pg(), pg()
    make(connection)
    writer.execute("begin; insert into account (id) values (1)")
    with in_background() as submit:
        adding = submit(connection.execute, "select fenceguard.add_fence('account', 'account:{id}', 'enforce')")
        until_waiting(observer, connection)
        writer.execute("commit")
        adding.result()

    assert sqlstate(writer, "insert into account (id) values (2)") == "ZF002"


def test_triggers_written_out_and_made_again_as_a_restore_does_guard_as_before(pg: Connect) -> None:
    connection = pg()
    make(connection)
    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")
    statements = [
        row[0]
        for row in connection.execute(
            "select pg_get_triggerdef(oid) from pg_trigger where tgrelid = 'account'::regclass and not tgisinternal"
        )
    ]
    connection.execute("create table copy (like account including all)")
    for statement in statements:
        connection.execute(statement.replace(" public.account ", " public.copy "))
    claim(connection, "account:1", 7)
    connection.execute("begin")
    announce(connection, ("account:1", 6))

    stale = sqlstate(connection, "insert into copy (id) values (1)")
    connection.execute("rollback")

    assert stale == "ZF001"
    assert connection.execute("select * from fenceguard.fence_of('copy')").fetchone() == (
        "enforce",
        "account:{id}",
        "fence",
    )


def test_the_template_is_kept_byte_by_byte(pg: Connect) -> None:
    connection = pg()
    make(connection)
    template = "größe '\\000' \\x00 → 00{id}0 %s"

    connection.execute("select fenceguard.add_fence('account', %s, 'enforce')", (template,))

    assert scalar(connection, "select resource from fenceguard.fence_of('account')") == template


def test_a_migration_stopped_half_way_leaves_nothing(pg: Connect) -> None:
    connection = pg()
    make(connection)
    before = picture(connection)
    with pytest.raises(psycopg.errors.DivisionByZero), connection.transaction():
        connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")
        connection.execute("select 1 / 0")

    assert picture(connection) == before
