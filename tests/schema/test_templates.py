"""One rule on both sides: what a row names as its resource, in Postgres and in `fenceguard.resources`."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.sql import Connect, Connection, announce, claim, detail, refusal, scalar, sqlstate, writing

from fenceguard.resources import Template, check_resource

examples = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

# Postgres has no text with a zero, and UTF-8 has no half of a surrogate pair.
texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20) | st.text(
    "a-:/é\x7f ", max_size=6
)

COLUMNS = "i bigint, n smallint, s text, v varchar(600), u uuid"


def rendered(template: str, row: dict[str, Any]) -> str | None:
    """Return what Python makes of a row: its resource, or `None` where it names none."""
    try:
        return Template.parse(template).render(row)
    except (TypeError, ValueError):
        return None


# -- names


@examples
@given(texts)
@example("")
@example("x" * 512)
@example("x" * 513)
@example("é" * 256)
@example("é" * 257)
@example("𝄞" * 128)
@example("a\u009f")
@example("a\u00a0")
def test_both_sides_take_the_same_names(pg: Connect, name: str) -> None:
    try:
        python = check_resource(name) == name
    except ValueError:
        python = False

    assert scalar(pg(), "select fenceguard.is_name(%s)", name) is python


# -- templates


@examples
@given(st.text("{}ab_.1 é:-", max_size=12))
@example("account:{id}")
@example("{a}{b}")
@example("{a}-{b}")
@example("{{a}}")
@example("{{{a}}}")
@example("{a}}")
@example("{}")
@example("{1a}")
@example("{a.b}")
@example("*")
def test_both_sides_read_the_same_templates(pg: Connect, source: str) -> None:
    try:
        parsed = Template.parse(source)
        # A field with a dot is for calls; a row has columns only.
        python = (
            None if any("." in field for field in parsed.fields) else (list(parsed.literals), list(parsed.fields))
        )
    except ValueError:
        python = None

    connection = pg()
    refused = refusal(connection, "select * from fenceguard.parse_template(%s)", source)
    sql = None
    if refused is None:
        sql = connection.execute("select * from fenceguard.parse_template(%s)", (source,)).fetchone()

    assert sql == python
    assert refused is None or (refused.sqlstate == "22023" and refused.diag.message_hint)


# -- rows, by the very trigger that guards them


class Rows:
    """A fenced table; `resource_of` inserts a row under a foreign grant and returns what it is refused for."""

    def __init__(self, connection: Connection, template: str) -> None:
        connection.execute(f"create table item ({COLUMNS})")
        connection.execute("select fenceguard.add_fence('item', %s, 'enforce')", (template,))
        claim(connection, "foreign", 1)
        self.connection = connection

    def resource_of(self, row: dict[str, Any]) -> str | None:
        with self.connection.transaction(force_rollback=True):
            announce(self.connection, ("foreign", 1))
            error = refusal(
                self.connection,
                f"insert into item ({', '.join(row)}) values ({', '.join(['%s'] * len(row))})",
                *row.values(),
            )
        assert error is not None
        assert error.sqlstate == "ZF004", error
        return detail(error)["resource"]


TEMPLATES = [
    "account:{i}",
    "{s}",
    "{v}!",
    "{u}",
    "{n}/{i}",
    "{s}--{v}",
    "{s}a{v}é{i}",
    "{v}-{u}",
    "{s}::{i}:{v}",
    "{{{s}}}/{{{v}}}",
    "'%s' \\ $guard$ :x {s}%%{i}",
]

rows = st.fixed_dictionaries(
    {
        "i": st.none() | st.integers(-(2**63), 2**63 - 1),
        "n": st.none() | st.integers(-(2**15), 2**15 - 1),
        "s": st.none() | texts,
        "v": st.none() | texts,
        "u": st.none() | st.uuids(),
    }
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_row_names_in_postgres_what_it_names_in_python(pg: Connect, template: str) -> None:
    table = Rows(pg(), template)

    @examples
    @given(rows)
    @example({"i": 0, "n": 0, "s": "", "v": "", "u": UUID(int=0)})
    @example({"i": -1, "n": -1, "s": "a-", "v": "-a", "u": UUID(int=2**128 - 1)})
    @example({"i": 1, "n": 1, "s": "x" * 600, "v": "x", "u": UUID(int=1)})
    @example({"i": 1, "n": 1, "s": "tab\t", "v": "c1\x85", "u": UUID(int=1)})
    @example({"i": 1, "n": 1, "s": ":", "v": "a:", "u": UUID(int=1)})
    @example({"i": 1, "n": 1, "s": "İıß", "v": "e\u0301", "u": UUID(int=1)})
    def same(row: dict[str, Any]) -> None:
        assert table.resource_of(row) == rendered(template, row)

    same()


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_row_is_written_under_the_resource_that_python_renders(pg: Connect, template: str) -> None:
    row = {"i": 42, "n": 7, "s": "größe ' \" \\ %s", "v": "x y", "u": UUID(int=5)}
    resource = rendered(template, row)
    if resource is None:  # a uuid always holds "-", and "größe" an "é"-free text
        assert template == "{v}-{u}"
        return
    connection = pg()
    Rows(connection, template)
    claim(connection, resource, 9)

    with writing(connection, (resource, 9)):
        connection.execute("insert into item (i, n, s, v, u) values (%s, %s, %s, %s, %s)", tuple(row.values()))

    assert connection.execute("select fence from item").fetchall() == [(9,)]


def test_two_rows_that_a_separator_could_confuse_name_nothing(pg: Connect) -> None:
    table = Rows(pg(), "{s}-{v}")

    assert table.resource_of({"s": "a-b", "v": "c"}) is None
    assert table.resource_of({"s": "a", "v": "b-c"}) is None
    assert table.resource_of({"s": "a", "v": "b"}) == "a-b"


@pytest.mark.parametrize("value", [None, ""])
def test_a_row_that_names_nothing_is_refused_whatever_is_announced(pg: Connect, value: str | None) -> None:
    connection = pg()
    table = Rows(connection, "doc:{s}")
    claim(connection, "doc:", 1)
    connection.execute("begin")
    announce(connection, ("doc:", 1))
    refused = sqlstate(connection, "insert into item (s) values (%s)", value)
    connection.execute("rollback")

    assert refused == "ZF004"
    assert table.resource_of({"s": value}) is None


def test_a_collation_that_takes_two_texts_for_one_makes_them_no_one_resource(pg: Connect) -> None:
    connection = pg()
    try:
        connection.execute(
            "create collation lax (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
        )
    except psycopg.errors.FeatureNotSupported:  # a server built without ICU has no such collation
        connection.execute('create collation lax from "C"')
    connection.execute("create table doc (name text collate lax, part text collate lax)")
    connection.execute("select fenceguard.add_fence('doc', 'doc:{name}-{part}', 'enforce')")
    claim(connection, "doc:a-x", 7)

    with writing(connection, ("doc:a-x", 7)):
        connection.execute("insert into doc values ('a', 'x')")
    connection.execute("begin")
    announce(connection, ("doc:a-x", 7))
    error = refusal(connection, "insert into doc values ('A', 'x')")
    connection.execute("rollback")

    assert error is not None
    assert error.sqlstate == "ZF004"
    assert detail(error)["resource"] == "doc:A-x"
    expression = scalar(connection, "select fenceguard.row_resource('doc', 'doc:{name}-{part}', 'new')")
    assert expression.count('::pg_catalog.text collate pg_catalog."C"') == expression.count("new.")


def test_domains_are_read_as_what_they_are_made_of(pg: Connect) -> None:
    connection = pg()
    connection.execute("create domain code as text check (value <> 'no'); create domain short as code")
    connection.execute("create table doc (code short)")
    connection.execute("select fenceguard.add_fence('doc', 'doc:{code}', 'enforce')")
    claim(connection, "doc:x", 7)

    with writing(connection, ("doc:x", 7)):
        connection.execute("insert into doc values ('x')")

    assert connection.execute("select fence from doc").fetchall() == [(7,)]


@pytest.mark.case("case 44: true/True, 1.50/1.5, timestamps in a template", control="inside")
@pytest.mark.parametrize(
    ("kind", "value", "python"),
    [
        ("boolean", "true", "True"),
        ("numeric", "1.50", "1.5"),
        ("timestamptz", "2027-01-01 00:00:00+00", "2027-01-01T00:00:00+00:00"),
        ("date", "2027-01-01", None),
        ("real", "0.1", None),
        ("double precision", "1.0", "1.0"),
        ("char(4)", "ab", "ab  "),
        ("bytea", "\\x00", None),
        ("jsonb", "{}", None),
        ("text[]", "{a}", None),
        ("inet", "::1", None),
        ("name", "a", None),
        ('"char"', "a", None),
        ("oid", "1", None),
    ],
)
def test_a_column_that_reads_differently_on_the_two_sides_is_refused_where_it_is_declared(
    pg: Connect, kind: str, value: str, python: str | None
) -> None:
    connection = pg()
    connection.execute(f"create table item (field {kind})")

    error = refusal(connection, "select fenceguard.add_fence('item', 'item:{field}', 'enforce')")

    assert error is not None
    assert error.sqlstate == "42804"
    assert '"field"' in str(error.diag.message_primary)
    # The control: what the two sides would have made of it.
    assert python is None or scalar(connection, f"select cast(%s as {kind})::text", value) != python
    assert connection.execute(
        "select attname from pg_attribute where attrelid = 'item'::regclass and attnum > 0"
    ).fetchall() == [("field",)]


def test_an_enum_is_refused_where_it_is_declared(pg: Connect) -> None:
    connection = pg()
    connection.execute("create type mood as enum ('sad', 'ok'); create table item (field mood)")

    assert sqlstate(connection, "select fenceguard.add_fence('item', 'item:{field}', 'enforce')") == "42804"


# -- an attack: names that the caller's search path finds first


HOSTILE = """
    create schema hostile;
    create function hostile.yes(text, text) returns boolean language sql immutable as 'select true';
    create operator hostile.= (leftarg = text, rightarg = text, function = hostile.yes);
    create operator hostile.<> (leftarg = text, rightarg = text, function = hostile.yes);
    create function hostile.something(jsonb, text) returns jsonb language sql immutable as
        $$ select pg_catalog.jsonb_build_object('token', 1000) $$;
    create operator hostile.-> (leftarg = jsonb, rightarg = text, function = hostile.something);
    create function hostile.current_setting(text, boolean) returns text language sql immutable as
        $$ select case $1 when 'fenceguard.unfenced' then pg_current_xact_id()::text || ' x' else '' end $$;
    create function hostile.concat(variadic "any") returns text language sql immutable as 'select null::text';
    create function hostile.starts_with(text, text) returns boolean language sql immutable as 'select true';
    create function hostile.format(text, variadic "any") returns text language sql immutable as $$ select '' $$;
    create domain hostile.jsonb as text;
    create domain hostile.text as pg_catalog.int4;
"""


@pytest.fixture
def attacked(pg: Connect) -> Connection:
    """A fenced table, seen by a session in whose search path each name that a trigger uses is another's first."""
    connection = pg()
    connection.execute("create table account (id int primary key, owner text, balance int default 0)")
    connection.execute("insert into account values (42, 'ann'), (43, 'bob')")
    connection.execute("select fenceguard.add_fence('account', 'account:{owner}-{id}', 'enforce')")
    claim(connection, "account:ann-42", 8)
    # Some cannot be made on every version: as many as can be.
    for statement in HOSTILE.split(";\n"):
        refusal(connection, statement)
    connection.execute("set search_path = hostile, pg_catalog, public")
    assert scalar(connection, "select 'a'::pg_catalog.text = 'b'::pg_catalog.text") is True  # the control
    assert scalar(connection, "select starts_with('a'::pg_catalog.text, 'b'::pg_catalog.text)") is True
    return connection


@pytest.mark.parametrize(
    "write",
    [
        "update public.account set balance = 1 where id operator(pg_catalog.=) 43",
        "insert into public.account values (44, 'eve')",
        "delete from public.account where id operator(pg_catalog.=) 43",
        "truncate public.account",
    ],
)
def test_no_search_path_of_the_caller_bends_the_triggers(attacked: Connection, write: str) -> None:
    unannounced = sqlstate(attacked, write)
    answers = []
    for token in (7, 8):
        attacked.execute("begin")
        attacked.execute(
            "select pg_catalog.set_config('fenceguard.grants', %s, true)",
            (json.dumps({"account:ann-42": {"token": token, "owner": "a"}}),),
        )
        answers.append(sqlstate(attacked, write))
        attacked.execute("rollback")

    assert unannounced == "ZF002"
    assert answers == ["ZF001", "ZF004"]


def test_under_a_hostile_search_path_the_holder_still_writes_its_row(attacked: Connection) -> None:
    attacked.execute("begin")
    attacked.execute(
        "select pg_catalog.set_config('fenceguard.grants', %s, true)",
        (json.dumps({"account:ann-42": {"token": 8, "owner": "a"}}),),
    )
    attacked.execute("update public.account set balance = 1 where id operator(pg_catalog.=) 42")
    attacked.execute("commit")

    attacked.execute("set search_path = public")
    assert attacked.execute("select balance, fence from account where id = 42").fetchall() == [(1, 8)]
