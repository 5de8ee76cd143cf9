"""fenceguard's own chain: installed once by however many, checked, taken back, printed, carried in the wheel."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import alembic.command
import psycopg
import pytest
from alembic.config import Config
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from support.services import Services, drop_database
from support.sql import claim, writing
from support.urls import at_database, driver

from fenceguard import SchemaMissing, StoreUnreachable, schema
from fenceguard.errors import TablesStillFenced
from fenceguard.schema import chain, checks, scripts

INSTALLED = """
    select proname, pg_get_functiondef(oid), proacl::text from pg_proc
    where pronamespace = 'fenceguard'::regnamespace order by 1
"""


@pytest.fixture
def empty(empty_database_url: str) -> Iterator[Engine]:
    """An engine on a database without fenceguard's schema."""
    engine = create_engine(driver(empty_database_url, "psycopg"), poolclass=NullPool)
    yield engine
    engine.dispose()


def installed(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(connection.scalar(text("select count(*) from pg_namespace where nspname = 'fenceguard'")))


# -- install


def test_install_brings_an_empty_database_to_head_and_commits(empty: Engine) -> None:
    with empty.connect() as connection:
        before = schema.status(connection)
        connection.rollback()
        schema.install(connection)

    with empty.connect() as connection:
        after = schema.status(connection)
        schema.check_version(connection)
    assert before == schema.Status(None, schema.HEAD, (schema.HEAD,))
    assert after == schema.Status(schema.HEAD, schema.HEAD, ())


def test_install_again_changes_nothing(engine: Engine) -> None:
    with engine.connect() as connection:
        before = connection.execute(text(INSTALLED)).all()
        connection.rollback()
        schema.install(connection)
        after = connection.execute(text(INSTALLED)).all()

    assert before == after


def test_install_in_a_transaction_of_the_caller_is_the_callers_to_commit(empty: Engine) -> None:
    with empty.connect() as connection:
        connection.execute(text("select 1"))
        schema.install(connection)
        connection.rollback()
    rolled_back = not installed(empty)

    with empty.begin() as connection:
        schema.install(connection)

    assert rolled_back
    assert installed(empty)


def test_install_that_fails_leaves_nothing(empty: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    read = scripts.statements
    monkeypatch.setattr(chain, "statements", lambda step: [*read(step), "select 1 / 0"])

    with empty.connect() as connection, pytest.raises(Exception, match="division by zero"):
        schema.install(connection)

    assert not installed(empty)


def test_install_on_an_autocommit_connection_is_refused(empty: Engine) -> None:
    autocommit = empty.execution_options(isolation_level="AUTOCOMMIT")

    with autocommit.connect() as connection, pytest.raises(ValueError, match="AUTOCOMMIT"):
        schema.install(connection)

    assert not installed(empty)


async def test_install_runs_on_an_async_connection(empty_database_url: str) -> None:
    engine = create_async_engine(driver(empty_database_url, "asyncpg"))
    async with engine.connect() as connection:
        await connection.run_sync(schema.install)

    async with engine.connect() as connection:
        status = await connection.run_sync(schema.status)
    await engine.dispose()
    assert status.current == schema.HEAD


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_at_any_isolation_a_second_installer_sees_what_the_first_installed(empty: Engine, isolation: str) -> None:
    lock = text(f"select pg_advisory_xact_lock({chain._LOCK})")
    strict = empty.execution_options(isolation_level=isolation)
    waiting = threading.Event()
    event.listen(strict, "before_cursor_execute", lambda *found: waiting.set() if "advisory" in found[2] else None)

    def second() -> schema.Status:
        with strict.connect() as connection:
            schema.install(connection)
            return schema.status(connection)

    with ThreadPoolExecutor() as pool, empty.begin() as first:
        first.execute(lock)
        late = pool.submit(second)
        assert waiting.wait(20)
        schema.install(first)
        first.commit()
        assert late.result().current == schema.HEAD


INSTALLER = """
import sys
from sqlalchemy import create_engine
from fenceguard import schema
engine = create_engine(sys.argv[1])
with engine.connect() as connection:
    connection.connection  # connected
    connection.rollback()
    print("ready", flush=True)
    sys.stdin.readline()
    schema.install(connection)
    print(schema.status(connection).current, flush=True)
"""


@pytest.mark.case("case 31: ten processes install the schema at the same moment", control="inside")
def test_of_ten_processes_one_installs_and_ten_succeed(empty: Engine, empty_database_url: str) -> None:
    url = driver(empty_database_url, "psycopg")
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", INSTALLER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(10)
        ]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("go\n")  # type: ignore[union-attr] it has a pipe
            child.stdin.flush()  # type: ignore[union-attr]
        answers = [child.communicate()[0] for child in children]

    assert answers == [f"{schema.HEAD}\n"] * 10
    assert [child.returncode for child in children] == [0] * 10
    with empty.connect() as connection:
        assert connection.scalars(text("select version_num from fenceguard.version")).all() == [schema.HEAD]
        # The control: the same step run twice does not pass, so nine did not run it.
        with pytest.raises(Exception, match="already exists"):
            connection.exec_driver_sql(scripts.statements("0001_up")[1])


# -- taking back


def test_downgrade_to_base_removes_schema_and_version_table(engine: Engine) -> None:
    with engine.connect() as connection:
        schema.downgrade(connection, "base")
    gone = not installed(engine)

    with engine.connect() as connection:
        schema.install(connection)

    assert gone
    assert installed(engine)


def test_downgrade_while_tables_are_fenced_is_refused_and_names_them(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            'create schema "s p"; create table account (id int); create table "s p"."Ta.b" (id int)'
        )
        connection.exec_driver_sql("create table entry (id int) partition by list (id)")
        connection.exec_driver_sql("create table entry_0 partition of entry default")
        for table in ("account", '"s p"."Ta.b"', "entry"):
            connection.exec_driver_sql(f"select fenceguard.add_fence('{table}', '*', 'enforce')")

    with engine.connect() as connection, pytest.raises(TablesStillFenced) as caught:
        schema.downgrade(connection, "base")

    assert caught.value.tables == ['"s p"."Ta.b"', "public.account", "public.entry"]
    assert pickle.loads(pickle.dumps(caught.value)).tables == caught.value.tables
    with engine.connect() as connection:
        assert connection.scalar(text("select fenceguard.version()")) == schema.HEAD


def test_the_down_step_refuses_in_sql_as_well(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("create table account (id int)")
        connection.exec_driver_sql("select fenceguard.add_fence('account', '*', 'enforce')")

    with engine.connect() as connection, pytest.raises(Exception, match="account") as caught:
        connection.execute(scripts.literal_text(scripts.statements("0001_down")[0]))

    assert caught.value.orig.sqlstate == "55006"  # type: ignore[attr-defined]


def test_downgrade_takes_orphaned_row_functions_with_it(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("create table account (id int)")
        connection.exec_driver_sql("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")
        connection.exec_driver_sql("drop table account")

    with engine.connect() as connection:
        schema.downgrade(connection, "base")

    assert not installed(engine)


def test_downgrade_where_nothing_is_installed_is_refused(empty: Engine) -> None:
    with empty.connect() as connection, pytest.raises(SchemaMissing, match="not installed"):
        schema.downgrade(connection, "base")

    assert not installed(empty)


@pytest.mark.parametrize("act", [schema.upgrade, schema.downgrade])
def test_an_unknown_revision_is_refused(engine: Engine, act: Any) -> None:
    with engine.connect() as connection, pytest.raises(ValueError, match="7777"):
        act(connection, "7777")


# -- what does not fit


@pytest.mark.parametrize(
    ("found", "names", "remedy"),
    [("0000", "at 0000", "fenceguard migrate up"), ("9999", "at 9999", f"fenceguard migrate down {schema.HEAD}")],
)
def test_an_older_and_a_newer_schema_are_named_with_the_remedy(
    engine: Engine, found: str, names: str, remedy: str
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"create or replace function fenceguard.version() returns text language sql immutable return '{found}'"
        )

    with engine.connect() as connection, pytest.raises(SchemaMissing, match=names) as caught:
        schema.check_version(connection)

    assert remedy in caught.value.remedy


def test_a_missing_schema_is_named_with_the_remedy(empty: Engine) -> None:
    with empty.connect() as connection, pytest.raises(SchemaMissing) as caught:
        schema.check_version(connection)

    assert "fenceguard migrate up" in str(caught.value)
    assert empty.url.database in str(caught.value)


def test_where_nothing_is_installed_no_table_is_fenced(empty: Engine) -> None:
    with empty.connect() as connection:
        assert schema.fenced_tables(connection) == []


def test_a_schema_of_that_name_with_nothing_of_ours_is_a_missing_one(empty: Engine) -> None:
    with empty.begin() as connection:
        connection.exec_driver_sql("create schema fenceguard")

    with empty.connect() as connection, pytest.raises(SchemaMissing, match="no fenceguard schema"):
        schema.check_version(connection)


def test_a_role_without_rights_is_told_which_are_missing(engine: Engine) -> None:
    role = f"app_{engine.url.database}"
    with engine.connect() as connection:
        connection.exec_driver_sql(f"create role {role}")
        connection.exec_driver_sql(f"set local role {role}")
        with pytest.raises(SchemaMissing, match=f"role '{role}' may not use") as caught:
            schema.check_version(connection)
        connection.rollback()

    assert "grant" in caught.value.remedy


def test_a_check_leaves_the_transaction_usable(empty: Engine) -> None:
    with empty.connect() as connection:
        with pytest.raises(SchemaMissing):
            schema.check_version(connection)

        assert connection.scalar(text("select 1")) == 1


def test_a_schema_from_the_future_is_neither_upgraded_nor_taken_back(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("update fenceguard.version set version_num = '9999'")

    for act, revision in ((schema.upgrade, "head"), (schema.downgrade, "base")):
        with engine.connect() as connection, pytest.raises(SchemaMissing, match="9999"):
            act(connection, revision)
    with engine.connect() as connection:
        assert schema.status(connection) == schema.Status("9999", schema.HEAD, ())


def test_a_server_older_than_supported_is_named_before_anything_is_changed(
    empty: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with empty.connect() as connection:
        major = int(connection.scalar(text("show server_version_num"))) // 10_000
    monkeypatch.setattr(checks, "MIN_SERVER", major + 1)

    with empty.connect() as connection, pytest.raises(StoreUnreachable, match=f"Postgres {major}") as caught:
        schema.install(connection)

    assert f"{major + 1} or newer" in caught.value.problem
    assert not installed(empty)


def test_from_psql_too_an_older_server_is_named_first(empty_database_url: str) -> None:
    # As if this server were older: the step's first statement compares with a version that none has.
    first = scripts.statements("0001_up")[0].replace("150000", "990000")
    with (
        psycopg.connect(empty_database_url) as connection,
        pytest.raises(psycopg.errors.FeatureNotSupported) as caught,
    ):
        connection.execute(first.encode())

    assert "needs 15 or newer" in str(caught.value)


def test_a_database_that_is_no_postgres_is_named(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    with engine.connect() as connection, pytest.raises(StoreUnreachable, match="sqlite"):
        schema.install(connection)
    engine.dispose()


def test_the_head_that_the_library_needs_is_the_chains() -> None:
    assert chain._script().get_current_head() == schema.HEAD


# -- as SQL


def test_the_printed_chain_installs_what_install_does(engine: Engine, empty: Engine) -> None:
    printed = schema.sql()

    # psql sends each statement as it stands; so does a connection without parameters.
    with psycopg.connect(
        empty.url.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True
    ) as raw:
        raw.execute(printed.encode())

    with engine.connect() as ours, empty.connect() as theirs:
        schema.check_version(theirs)
        assert schema.status(theirs) == schema.status(ours)
        assert theirs.execute(text(INSTALLED)).all() == ours.execute(text(INSTALLED)).all()
    assert printed.count("BEGIN;") == printed.count("COMMIT;") == 1
    assert printed.count("%") == sum(step.count("%") for step in scripts.statements("0001_up"))


def test_statements_are_taken_apart_at_their_own_semicolons() -> None:
    found = scripts.statements("0001_up")

    assert all(not statement.endswith(";") for statement in found)
    assert sum(statement.count("$function$") % 2 for statement in found) == 0
    files = (Path(scripts.__file__).parent / "sql/0001_up").glob("*.sql")
    function = re.compile(r"^create function (\S+?)\(", re.MULTILINE)
    declared = [name for file in files for name in function.findall(file.read_text())]
    taken = [function.findall(one) for one in found]
    assert sorted(name for names in taken for name in names) == sorted(declared)
    assert max(len(names) for names in taken) == 1


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        ("account:{id}", "'account:{id}'"),
        ("it's", "'it''s'"),
        ("100%", r"E'100\x25'"),
        ("a\\b", r"E'a\\b'"),
        ("'\\%'", r"E'''\\\x25'''"),
    ],
)
def test_a_literal_reads_the_same_on_every_path(engine: Engine, value: str, literal: str) -> None:
    assert scripts.quote_literal(value) == literal
    with engine.connect() as connection:
        assert connection.scalar(scripts.literal_text(f"select {literal}")) == value
        connection.exec_driver_sql("set standard_conforming_strings = off") if "\\" not in value else None
        assert connection.scalar(scripts.literal_text(f"select {literal}")) == value


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_in_another_encoding_is_served_as_well(services: Services, encoding: str) -> None:
    name = f"fg_test_{services.run}_{encoding.lower()}"
    with psycopg.connect(services.postgres_url, autocommit=True) as connection:
        connection.execute(
            f"create database {name} encoding {encoding} template template0 lc_collate 'C' lc_ctype 'C'".encode()
        )
    url = at_database(services.postgres_url, name)
    engine = create_engine(driver(url, "psycopg"), poolclass=NullPool, connect_args={"client_encoding": "utf8"})
    try:
        with engine.connect() as connection:
            schema.install(connection)
        with psycopg.connect(url, autocommit=True, client_encoding="utf8") as raw:
            raw.execute("create table item (name text)")
            raw.execute("select fenceguard.add_fence('item', 'Straße:{name}', 'enforce')")
            claim(raw, "Straße:À", 7)
            with writing(raw, ("Straße:À", 7)):
                raw.execute("insert into item values ('À')")
            stamps = raw.execute("select fence from item").fetchall()
    finally:
        with psycopg.connect(services.postgres_url, autocommit=True) as connection:
            drop_database(connection, name)

    assert stamps == [(7,)]


# -- the folder


def test_alembic_itself_can_run_the_chain_on_a_connection(empty: Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(schema.migrations_dir()))
    with empty.begin() as connection:
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")
    with empty.begin() as connection:
        status = schema.status(connection)
        config.attributes["connection"] = connection
        alembic.command.downgrade(config, "base")
        after = schema.status(connection)

    assert (status.current, after.current) == (schema.HEAD, None)


def test_a_migration_that_runs_the_chain_keeps_its_own_alembic(
    engine: Engine, empty: Engine, tmp_path: Path
) -> None:
    # Alembic's `op` and `context` are globals: installing from your env.py must not take them away.
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(
        "from alembic import context\n"
        "from fenceguard import schema\n"
        "schema.register()\n"
        "connection = context.config.attributes['connection']\n"
        "schema.install(connection)\n"
        "context.configure(connection=connection)\n"
        "with context.begin_transaction():\n"
        "    context.run_migrations()\n"
    )
    (tmp_path / "versions/1.py").write_text(
        "from alembic import op\nfrom fenceguard import schema\nrevision, down_revision = '1', None\n"
        "def upgrade():\n"
        "    op.execute('create table account (id int)')\n"
        "    schema.install(op.get_bind())\n"
        "    op.add_fence('account', resource='account:{id}', level='enforce')\n"
    )
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    with empty.begin() as connection:
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "head")

    with empty.connect() as connection:
        assert schema.fenced_tables(connection) == ["public.account"]


def test_the_wheel_carries_the_chain_inside_the_package(tmp_path: Path, empty_database_url: str) -> None:
    root = Path(schema.__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=root,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    program = (
        "import fenceguard, sys; from fenceguard import schema; from sqlalchemy import create_engine\n"
        "engine = create_engine(sys.argv[1])\n"
        "with engine.connect() as c: schema.install(c)\n"
        "print(schema.migrations_dir())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, driver(empty_database_url, "psycopg")],
        env={"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )

    assert answer.stdout.strip() == str(tmp_path / "site/fenceguard/_migrations")
    assert not [name for name in names if name.startswith(("migrations/", "tests/"))]
    with psycopg.connect(empty_database_url) as connection:
        assert connection.execute("select fenceguard.version()").fetchone() == (schema.HEAD,)


def test_importing_fenceguard_imports_no_alembic() -> None:
    program = "import sys, fenceguard; print('alembic' in sys.modules, 'sqlalchemy' in sys.modules)"

    answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)

    assert answer.stdout == "False False\n"
