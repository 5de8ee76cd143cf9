"""What the README shows is run: its Python blocks, its SQL and, as far as a test can, its commands."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Engine, create_engine
from support.command import fenceguard as command
from support.services import Services
from support.urls import driver, place

import fenceguard
from fenceguard import StaleToken, UnfencedWrite, schema

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
REDIS = "redis://localhost:6379/0"
POSTGRES = "postgresql+asyncpg://app@localhost/app"


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


MIGRATION, MODEL, HOLD, DECORATOR, CONDITIONAL = blocks("python")
(GRANTS,) = blocks("sql")


def run(code: str) -> dict[str, Any]:
    """Run a block as a module of its own would, and return what it defines."""
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec", dont_inherit=True), names)  # noqa: S102 it is the point
    return names


@dataclass(frozen=True)
class Application:
    """A database on which the README's steps were taken, and the names that its blocks define."""

    owner: Engine
    names: dict[str, Any]

    def balance(self) -> tuple[int, int]:
        """Return balance and stamp of account 42."""
        with self.owner.connect() as connection:
            row = connection.exec_driver_sql("select balance, fence from account where id = 42").one()
        return row[0], row[1]


@pytest.fixture
def role(services: Services) -> Generator[str]:
    """A role of an application, without any right."""
    name = f"app_{secrets.token_hex(4)}"
    with psycopg.connect(services.postgres_url, autocommit=True) as connection:
        connection.execute(f"create role {name} login password 'app'")
        yield name
        connection.execute(f"drop role {name}")


@pytest.fixture
def owner(role: str, empty_database_url: str, tmp_path: Path) -> Generator[Engine]:
    """The database after `fenceguard migrate up`, the README's migration and its grants."""
    ran = command("migrate", "up", "--postgres", empty_database_url, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    schema.register()
    engine = create_engine(driver(empty_database_url, "psycopg"))
    with engine.begin() as connection:
        connection.exec_driver_sql("create table account (id bigint primary key, balance bigint not null)")
        connection.exec_driver_sql("insert into account values (42, 100)")
        connection.exec_driver_sql(
            "create table report (id bigint primary key, text text not null, fence bigint not null default 0)"
        )
        connection.exec_driver_sql("insert into report values (1, '')")
        migrate(connection, "upgrade")
        connection.exec_driver_sql(GRANTS.replace(" to app;", f" to {role};"))
        connection.exec_driver_sql(f"grant select, insert, update, delete on account, report to {role}")
    yield engine
    with engine.begin() as connection:
        connection.exec_driver_sql(f"drop owned by {role}")
    engine.dispose()


def migrate(connection: Any, step: str) -> None:
    """Run a step of the README's migration."""
    with Operations.context(MigrationContext.configure(connection)):
        run(MIGRATION)[step]()


@pytest.fixture
async def application(role: str, owner: Engine, services: Services) -> AsyncGenerator[Application]:
    host, port = place(services.postgres_url)
    urls = {
        REDIS: services.redis_url,
        POSTGRES: f"postgresql+asyncpg://{role}:app@{host}:{port}/{owner.url.database}",
    }
    # The README's resource is no test's own: a prefix is.
    code = HOLD.replace("ttl=30.0", f"ttl=30.0, prefix={'fg-' + secrets.token_hex(6)!r}")
    for shown, real in urls.items():
        assert code.count(shown) == 1
        code = code.replace(shown, real)
    names = run(MODEL + code + DECORATOR + CONDITIONAL)
    yield Application(owner, names)
    guard = names["guard"]
    bind = names["Session"].kw["bind"]
    await guard.close()
    await bind.dispose()
    await names["leases"].aclose()


async def test_a_withdrawal_under_a_hold_is_written_and_stamped(application: Application) -> None:
    await application.names["withdraw"](42, 30)
    assert application.balance() == (70, 1)


async def test_a_decorated_deposit_is_written_and_stamped(application: Application) -> None:
    await application.names["AccountRepository"]().deposit(account_id=42, amount=30)
    assert application.balance() == (130, 1)


async def test_a_write_that_forgets_the_hold_is_refused(application: Application) -> None:
    with pytest.raises(UnfencedWrite):
        async with application.names["Session"].begin() as session:
            account = await session.get_one(application.names["Account"], 42)
            account.balance -= 30
    assert application.balance() == (100, 0)


async def test_a_write_after_somebody_newer_has_claimed_is_refused_as_the_comment_says(
    application: Application,
) -> None:
    async def withdraw_late() -> None:
        async with application.names["guard"].hold("account:42"), application.names["Session"].begin() as session:
            account = await session.get_one(application.names["Account"], 42)
            with application.owner.begin() as connection:
                connection.exec_driver_sql("select fenceguard.claim('account:42', 7, 'somebody newer')")
            account.balance -= 30

    with pytest.raises(StaleToken) as raised:
        await withdraw_late()
    assert (raised.value.token, raised.value.newest) == (1, 7)
    assert raised.value.__cause__.sqlstate == "ZF001"
    assert application.balance() == (100, 0)


def test_the_migration_can_be_taken_back(owner: Engine) -> None:
    with owner.begin() as connection:
        fenced = schema.fenced_tables(connection)
        migrate(connection, "downgrade")
        free = schema.fenced_tables(connection)
    assert (fenced, free) == (["public.account"], [])


async def test_a_conditional_statement_writes_and_stamps_and_is_refused_under_an_older_token(
    application: Application,
) -> None:
    publish = application.names["publish"]
    await publish(1, "newer", token=8)
    with pytest.raises(StaleToken) as raised:
        await publish(1, "older", token=7)
    with application.owner.connect() as connection:
        row = connection.exec_driver_sql("select text, fence from report where id = 1").one()
    assert (raised.value.token, raised.value.newest) == (7, 8)
    assert tuple(row) == ("newer", 8)


def test_an_application_that_was_granted_what_is_shown_has_no_right_beside_it(role: str, owner: Engine) -> None:
    """That what is shown is enough, the tests above say: they work as this role."""
    with owner.connect() as connection:
        granted = connection.exec_driver_sql(
            "select p.proname from pg_proc p where p.pronamespace = 'fenceguard'::regnamespace"
            f" and has_function_privilege('{role}', p.oid, 'execute') order by 1"
        ).scalars()
        shown = sorted(re.findall(r"fenceguard\.(\w+)", GRANTS))
        assert list(granted) == shown
        assert "unfenced" not in shown


def test_the_rights_shown_are_those_that_the_schema_names() -> None:
    comment = (ROOT / "fenceguard/schema/sql/0001_up/8_rights.sql").read_text(encoding="utf-8")
    named = re.findall(r"grant [^;]+ to app;", comment.replace("\n--", ""))
    assert [grant.split() for grant in named] == [f"{grant};".split() for grant in GRANTS.split(";")[:-1]]


async def test_without_the_grant_the_guard_says_what_is_missing(role: str, application: Application) -> None:
    with application.owner.begin() as connection:
        connection.exec_driver_sql(f"revoke usage on schema fenceguard from {role}")
    with pytest.raises(fenceguard.SchemaMissing) as raised:
        await application.names["withdraw"](42, 30)
    assert role in str(raised.value)
    assert application.balance() == (100, 0)


@pytest.mark.parametrize("block", [MIGRATION, MODEL, HOLD, DECORATOR, CONDITIONAL])
def test_each_use_has_less_than_15_lines(block: str) -> None:
    assert len(block.splitlines()) < 15


def test_the_two_commands_stand_there_and_their_extras_and_marker_exist() -> None:
    demo, tests = (block.strip() for block in blocks("sh"))
    assert demo == "python3.11 -m venv .venv && .venv/bin/pip install -q -e '.[all]' && .venv/bin/fenceguard demo"
    assert tests == (
        "python3.11 -m venv .venv && .venv/bin/pip install -q -e '.[all,test]' && .venv/bin/pytest -m 'not debian'"
    )
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r"^all = ", project, re.MULTILINE)
    assert re.search(r"^test = ", project, re.MULTILINE)
    assert '"debian: ' in project


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([A-Z]\w+)`", TEXT)) - {"URL", "SIGSTOP"}))
def test_each_name_that_the_text_mentions_exists(name: str) -> None:
    assert hasattr(fenceguard, name)


def test_no_line_is_longer_than_120_columns_but_commands_and_tables() -> None:
    long = [line for line in TEXT.splitlines() if len(line) > 125 and not line.startswith(("|", "python"))]
    assert long == []
