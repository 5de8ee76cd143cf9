"""Who may do what: nobody until it is granted, and then as the comment in ``8_rights.sql`` says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from support.sql import Connect, Connection, announce, claim, scalar, sqlstate, writing

from fenceguard.schema import scripts

Role: TypeAlias = Callable[[str], str]

_COMMENT = (Path(scripts.__file__).parent / "sql/0001_up/8_rights.sql").read_text()
GRANTS = re.findall(r"grant [^;]+;", _COMMENT.replace("\n--", ""))


def let(connection: Connection, role: str, to: str) -> None:
    """Grant a role what the comment grants to `app`, `maintainer` or `migrator`."""
    granted = [grant for grant in GRANTS if grant.endswith(f" to {to};")]
    assert granted
    for grant in granted:
        connection.execute(grant.replace(f" to {to};", f' to "{role}"').encode())


def test_public_may_nothing(pg: Connect, role: Role) -> None:
    connection = pg()
    stranger = role("stranger")
    connection.execute("create table account (id int primary key)")
    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'reject')")

    open_functions = connection.execute(
        "select oid::regprocedure from pg_proc where pronamespace = 'fenceguard'::regnamespace "
        "and has_function_privilege(%s, oid, 'execute')",
        (stranger,),
    ).fetchall()

    assert open_functions == []
    assert not scalar(connection, "select has_schema_privilege(%s, 'fenceguard', 'usage')", stranger)
    assert not scalar(connection, "select has_table_privilege(%s, 'fenceguard.fence', 'select')", stranger)


def test_an_application_claims_enters_and_writes_and_touches_no_fence(pg: Connect, role: Role) -> None:
    connection, app = pg(), pg()
    name = role("app")
    connection.execute("create table account (id int primary key, balance int default 0)")
    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")
    let(connection, name, "app")
    connection.execute(f'grant insert, update, delete, select, truncate on account to "{name}"')
    app.execute(f'set session authorization "{name}"')

    claim(app, "account:1", 7)
    with writing(app, ("account:1", 7)):
        app.execute("insert into account values (1, 5)")
    with writing(app):
        app.execute("select fenceguard.enter('account:1', 7, 'a')")
        app.execute("update account set balance = 6")
    with writing(app, ("account:1", 7)):
        app.execute("truncate account")
    app.execute("begin")
    announce(app, ("account:1", 6))
    stale = sqlstate(app, "insert into account values (1, 7)")
    app.execute("rollback")
    unannounced = sqlstate(app, "insert into account values (1, 8)")

    assert (stale, unannounced) == ("ZF001", "ZF002")
    assert app.execute("select fenceguard.gate_holders('account:1')").fetchall() == []
    assert connection.execute("select balance, fence from account").fetchall() == []
    for forbidden in (
        "select * from fenceguard.fence",
        "update fenceguard.fence set token = 9",
        "delete from fenceguard.fence",
        "insert into fenceguard.fence values ('x', 1, 'a', '00000001')",
        "truncate fenceguard.fence",
        "select * from fenceguard.version",
        "select fenceguard.unfenced('repair')",
        "select fenceguard.timeline()",
        "select fenceguard.compare('account:1', 7, 'a', null)",
        "select fenceguard.add_fence('account', '*', 'reject')",
        "select fenceguard.drop_fence('account')",
        "alter table account disable trigger all",
        "create function fenceguard.version(int) returns text language sql as 'select 1'",
    ):
        assert sqlstate(app, forbidden) == "42501", forbidden


def test_a_maintainer_writes_round_the_fence_as_well(pg: Connect, role: Role) -> None:
    connection, maintainer = pg(), pg()
    name = role("maintainer")
    connection.execute("create table account (id int primary key, balance int default 0)")
    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")
    for to in ("app", "maintainer"):
        let(connection, name, to)
    connection.execute(f'grant insert on account to "{name}"')
    maintainer.execute(f'set session authorization "{name}"')

    maintainer.execute("begin; select fenceguard.unfenced('repair'); insert into account values (1, 9); commit")

    assert connection.execute("select balance, fence from account").fetchall() == [(9, 0)]


def test_the_readme_shows_the_same_rights_for_the_application() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = re.findall(r"^grant [^;]+;", readme, re.MULTILINE)

    listed = [" ".join(grant.split()) for grant in GRANTS if grant.endswith(" to app;")]
    assert [" ".join(grant.split()) for grant in shown] == listed


@pytest.mark.parametrize(
    "missing", ["usage on schema fenceguard", "execute on function fenceguard.enter_announced"]
)
def test_an_application_without_the_rights_writes_nothing_under_a_grant(
    pg: Connect, role: Role, missing: str
) -> None:
    connection, app = pg(), pg()
    name = role("app")
    connection.execute("create table account (id int primary key)")
    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'reject')")
    let(connection, name, "app")
    connection.execute(f'grant insert on account to "{name}"')
    connection.execute(f'revoke {missing} from "{name}"'.encode())
    claim(connection, "account:1", 7)
    app.execute(f'set session authorization "{name}"')
    app.execute("begin")
    announce(app, ("account:1", 7))

    assert sqlstate(app, "insert into account values (1)") == "42501"


def test_a_migrator_fences_its_tables_and_an_installer_can_still_remove_the_schema(pg: Connect, role: Role) -> None:
    connection, migrator = pg(), pg()
    name = role("migrator")
    let(connection, name, "migrator")
    connection.execute(f'create schema app authorization "{name}"')
    connection.execute("create table public.other (id int)")
    migrator.execute(f'set session authorization "{name}"')
    migrator.execute("create table app.account (id int primary key)")

    migrator.execute("select fenceguard.add_fence('app.account', 'account:{id}', 'enforce')")
    refused = sqlstate(migrator, "insert into app.account values (1)")
    not_its_own = sqlstate(migrator, "select fenceguard.add_fence('public.other', '*', 'enforce')")
    migrator.execute("select fenceguard.drop_fence('app.account')")

    assert refused == "ZF002"
    assert not_its_own == "42501"
    migrator.execute("select fenceguard.add_fence('app.account', 'account:{id}', 'enforce')")
    migrator.execute("drop table app.account")
    for statement in scripts.statements("0001_down"):
        connection.execute(statement.encode())


def test_a_cascade_writes_as_the_childs_owner_who_therefore_must_be_able_to_enter(pg: Connect, role: Role) -> None:
    connection, app = pg(), pg()
    owner, name = role("owner"), role("app")
    connection.execute("create table parent (id int primary key)")
    connection.execute("create table child (id int primary key references parent on delete cascade)")
    connection.execute("insert into parent values (1), (2); insert into child values (1), (2)")
    connection.execute(f'alter table child owner to "{owner}"')
    connection.execute(f'grant select, delete on parent to "{name}"')
    connection.execute(f'grant references, select on parent to "{owner}"')
    refused = sqlstate(connection, "select fenceguard.add_fence('child', 'child:{id}', 'enforce')")
    for grantee in (owner, name):
        let(connection, grantee, "app")
    connection.execute("select fenceguard.add_fence('child', 'child:{id}', 'enforce')")
    claim(connection, "child:1", 7)
    app.execute(f'set session authorization "{name}"')

    with writing(app, ("child:1", 7)):
        app.execute("delete from parent where id = 1")
    wrong = None
    with writing(app, ("child:1", 7)):
        app.execute("savepoint s")
        wrong = sqlstate(app, "delete from parent where id = 2")
        app.execute("rollback to savepoint s")

    assert refused == "42501"
    assert wrong == "ZF004"
    assert connection.execute("select id from child").fetchall() == [(2,)]


DEFINERS = """
    select proname, proconfig from pg_proc
    where pronamespace = 'fenceguard'::regnamespace and prosecdef
    order by 1
"""


def test_definers_run_with_a_fixed_search_path(pg: Connect) -> None:
    definers = pg().execute(DEFINERS).fetchall()

    assert [name for name, _ in definers] == ["claim", "enter", "enter_announced"]
    assert {tuple(settings) for _, settings in definers} == {("search_path=pg_catalog, pg_temp",)}


def test_a_temporary_table_named_like_a_catalog_does_not_reach_a_definer(pg: Connect) -> None:
    connection = pg()
    connection.execute("create temp table fence (resource text, token bigint, owner text, timeline text)")
    connection.execute("set search_path = pg_temp, public")
    claim(connection, "r", 7)

    assert scalar(connection, "select count(*) from pg_temp.fence") == 0
    assert scalar(connection, "select token from fenceguard.fence") == 7
