"""``op.add_fence`` and ``op.drop_fence`` in a user's own chain: sync, async and as SQL."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import alembic.command
import psycopg
import pytest
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import NullPool
from support.sql import Connect, scalar, sqlstate
from support.urls import driver

from fenceguard import SchemaMissing, schema
from fenceguard.resources import ANY_RESOURCE

Chain: TypeAlias = Callable[[str, str], Config]

ENV = """
import asyncio
from alembic import context
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from fenceguard import schema

schema.register()
url = context.config.attributes["url"]


def run(connection):
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()


async def run_async():
    engine = create_async_engine(url)
    try:
        async with engine.connect() as connection:
            await connection.run_sync(run)
    finally:
        await engine.dispose()


if context.is_offline_mode():
    context.configure(url=url, literal_binds=True, **context.config.attributes["offline"])
    with context.begin_transaction():
        context.run_migrations()
elif "asyncpg" in url:
    asyncio.run(run_async())
else:
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            run(connection)
    finally:
        engine.dispose()
"""

VERSION = """
from alembic import op
revision, down_revision = "1", None

def upgrade():
    op.execute("create table account (id int primary key)")
    {upgrade}

def downgrade():
    op.drop_fence("account")
    op.execute("drop table account")
"""


@pytest.fixture
def chain(tmp_path: Path, database_url: str) -> Chain:
    """A factory of user chains: ``chain("psycopg", "op.add_fence(…)")`` returns its config."""

    def make(name: str, upgrade: str) -> Config:
        (tmp_path / "versions").mkdir()
        (tmp_path / "env.py").write_text(ENV)
        (tmp_path / "versions/1.py").write_text(VERSION.format(upgrade=upgrade))
        config = Config(output_buffer=io.StringIO())
        config.set_main_option("script_location", str(tmp_path))
        config.attributes["url"] = driver(database_url, name)
        config.attributes["offline"] = {"dialect_opts": {"paramstyle": "named"}}
        return config

    return make


ADD = "op.add_fence('account', resource='account:{id}', level='enforce')"


@pytest.mark.parametrize("name", ["psycopg", "asyncpg"])
def test_a_migration_fences_a_table_and_its_downgrade_unfences_it(pg: Connect, chain: Chain, name: str) -> None:
    config = chain(name, ADD)
    connection = pg()

    alembic.command.upgrade(config, "head")
    refused = sqlstate(connection, "insert into account values (1)")
    fence = connection.execute("select * from fenceguard.fence_of('account')").fetchone()
    alembic.command.downgrade(config, "base")

    assert refused == "ZF002"
    assert fence == ("enforce", "account:{id}", "fence")
    assert scalar(connection, "select to_regclass('account')") is None
    assert scalar(connection, "select count(*) from pg_proc where proname like 'guard\\_rows\\_%'") == 0


NAMES = [
    ("account", None, "account:{id}", "fence"),
    ('ta"b le', "Sch ema", "größe 100% it's \\ :x {id}", "fe'n:ce"),
    ("%s", "a:b", "%(x)s %%{id}", "%"),
    (":x", "::y", "{{:id}} '%' {id}\\:", ":x"),
]


def apply(operations: Operations, names: tuple[str, str | None, str, str]) -> None:
    table, in_schema, resource, column = names
    operations.add_fence(table, resource=resource, level="reject", schema=in_schema, column=column)  # type: ignore[attr-defined] registered


def prepare(connection: psycopg.Connection[Any], names: tuple[str, str | None, str, str]) -> str:
    """Make the table and return its quoted name."""
    table, in_schema, _, _ = names
    whole = psycopg.sql.Identifier(*([table] if in_schema is None else [in_schema, table])).as_string(connection)
    if in_schema is not None:
        connection.execute(psycopg.sql.SQL("create schema {}").format(psycopg.sql.Identifier(in_schema)))
    connection.execute(f"create table {whole} (id int primary key)".encode())
    return whole


@pytest.mark.parametrize("names", NAMES)
def test_names_and_templates_of_every_kind_pass_unchanged_online(
    pg: Connect, engine: Engine, names: tuple[str, str | None, str, str]
) -> None:
    connection = pg()
    table = prepare(connection, names)
    schema.register()

    with engine.begin() as target:
        apply(Operations(MigrationContext.configure(target)), names)

    found = connection.execute("select * from fenceguard.fence_of(%s::regclass)", (table,)).fetchone()
    assert found == ("reject", names[2], names[3])
    with engine.begin() as target:
        Operations(MigrationContext.configure(target)).drop_fence(names[0], schema=names[1])  # type: ignore[attr-defined] registered
    assert scalar(connection, "select level from fenceguard.fence_of(%s::regclass)", table) is None


@pytest.mark.parametrize("names", NAMES)
async def test_names_and_templates_of_every_kind_pass_unchanged_on_asyncpg(
    pg: Connect, async_engine: AsyncEngine, names: tuple[str, str | None, str, str]
) -> None:
    connection = pg()
    table = prepare(connection, names)
    schema.register()

    async with async_engine.begin() as target:
        await target.run_sync(lambda inner: apply(Operations(MigrationContext.configure(inner)), names))

    found = connection.execute("select * from fenceguard.fence_of(%s::regclass)", (table,)).fetchone()
    assert found == ("reject", names[2], names[3])


# Without the paramstyle Alembic doubles each percent sign that it sees.
@pytest.mark.parametrize("dialect_opts", [{"paramstyle": "named"}, {}])
@pytest.mark.parametrize("names", NAMES)
def test_names_and_templates_of_every_kind_pass_unchanged_as_sql(
    pg: Connect, names: tuple[str, str | None, str, str], dialect_opts: dict[str, str]
) -> None:
    connection = pg()
    table = prepare(connection, names)
    schema.register()
    printed = io.StringIO()
    context = MigrationContext.configure(
        dialect_name="postgresql", dialect_opts=dialect_opts, opts={"as_sql": True, "output_buffer": printed}
    )

    apply(Operations(context), names)
    connection.execute(printed.getvalue().encode())

    found = connection.execute("select * from fenceguard.fence_of(%s::regclass)", (table,)).fetchone()
    assert found == ("reject", names[2], names[3])


def test_a_chain_printed_as_sql_fences_from_psql(pg: Connect, chain: Chain) -> None:
    config = chain("psycopg", ADD)
    alembic.command.upgrade(config, "head", sql=True)
    printed = config.output_buffer.getvalue()  # type: ignore[union-attr] a StringIO
    connection = pg()

    connection.execute(printed.encode())

    assert """select fenceguard.add_fence('"account"'::regclass, 'account:{id}', 'enforce', 'fence');""" in printed
    assert sqlstate(connection, "insert into account values (1)") == "ZF002"


def test_printed_sql_fails_clearly_where_the_schema_is_missing(chain: Chain, empty_database_url: str) -> None:
    config = chain("psycopg", ADD)
    alembic.command.upgrade(config, "head", sql=True)

    with (
        psycopg.connect(empty_database_url) as connection,
        pytest.raises(psycopg.errors.InvalidSchemaName) as caught,
    ):
        connection.execute(config.output_buffer.getvalue().encode())  # type: ignore[union-attr] a StringIO

    assert '"fenceguard"' in str(caught.value)


@pytest.mark.parametrize("name", ["psycopg", "asyncpg"])
@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("op.add_fence('account', resource='account:{number}', level='enforce')", "no column"),
        ("op.add_fence('account', resource='account:{id', level='enforce')", "unmatched"),
        ("op.add_fence('account', resource='', level='enforce')", "512 bytes"),
        ("op.add_fence('account', resource='account:{id}', level='strict')", "strict.*reject.*enforce"),
        ("op.add_fence('accounts', resource='account:{id}', level='enforce')", "accounts"),
        ("op.add_fence('account', resource='account:{id}', level='enforce', schema='other')", "other"),
        ("op.add_fence('account', resource='account:{id}', level='enforce', column='id')", "row fence itself"),
        (f"{ADD}; op.add_fence('account', resource='*', level='enforce')", "fenced already.*Drop"),
    ],
)
def test_misuse_is_a_value_error_that_says_what_to_do(
    pg: Connect, chain: Chain, name: str, call: str, problem: str
) -> None:
    config = chain(name, call)

    with pytest.raises(ValueError, match=problem):
        alembic.command.upgrade(config, "head")

    assert scalar(pg(), "select to_regclass('account')") is None


@pytest.mark.parametrize("name", ["psycopg", "asyncpg"])
def test_dropping_no_fence_is_schema_missing(chain: Chain, name: str) -> None:
    config = chain(name, "op.drop_fence('account')")

    with pytest.raises(SchemaMissing, match=r"public\.account has no fence"):
        alembic.command.upgrade(config, "head")


@pytest.mark.parametrize("call", [ADD, "op.drop_fence('account')"])
def test_without_fenceguards_schema_the_operation_says_which_command_to_run(
    chain: Chain, call: str, empty_database_url: str
) -> None:
    config = chain("psycopg", call)
    config.attributes["url"] = driver(empty_database_url, "psycopg")

    with pytest.raises(SchemaMissing, match="fenceguard migrate up"):
        alembic.command.upgrade(config, "head")


def test_another_error_of_the_database_stays_what_it_is(pg: Connect, database_url: str) -> None:
    connection = pg()
    connection.execute("create table account (id int primary key)")
    connection.execute("begin")
    connection.execute("lock table account in access share mode")
    engine = create_engine(driver(database_url, "psycopg"), poolclass=NullPool)
    schema.register()

    with pytest.raises(Exception, match="lock timeout") as caught, engine.begin() as target:
        target.exec_driver_sql("set local lock_timeout = '20ms'")
        apply(Operations(MigrationContext.configure(target)), ("account", None, "*", "fence"))

    assert caught.value.orig.sqlstate == "55P03"  # type: ignore[attr-defined]


def test_missing_rights_are_told_with_the_grant_that_gives_them(
    pg: Connect, engine: Engine, role: Callable[[str], str]
) -> None:
    connection = pg()
    migrator, owner = role("migrator"), role("owner")
    connection.execute("create table account (id int primary key)")
    connection.execute(f"grant usage on schema fenceguard to {migrator}".encode())
    connection.execute(f"grant execute on function fenceguard.version to {migrator}".encode())
    schema.register()

    with engine.connect() as target:
        target.exec_driver_sql(f"set local role {migrator}")
        with pytest.raises(SchemaMissing) as unable:
            apply(Operations(MigrationContext.configure(target)), ("account", None, "*", "fence"))
    connection.execute(f"alter table account owner to {owner}".encode())
    with engine.connect() as target, pytest.raises(SchemaMissing) as unowned:
        apply(Operations(MigrationContext.configure(target)), ("account", None, "*", "fence"))

    assert "permission denied for function add_fence" in unable.value.problem
    assert unable.value.remedy == "grant the rights that the README shows"
    assert f"{owner}, the owner of public.account, may not enter" in unowned.value.problem
    assert unowned.value.remedy.startswith(f"grant usage on schema fenceguard to {owner};")


def test_registering_twice_changes_nothing() -> None:
    schema.register()
    first = Operations.add_fence  # type: ignore[attr-defined] registered

    schema.register()

    assert Operations.add_fence is first  # type: ignore[attr-defined] registered


def test_an_addition_is_taken_back_by_a_drop() -> None:
    taken = schema.AddFence("account", resource=ANY_RESOURCE, level="enforce", schema="s", column="fence").reverse()

    assert taken.to_sql() == """select fenceguard.drop_fence('"s"."account"'::regclass)"""
