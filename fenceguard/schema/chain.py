"""fenceguard's own Alembic chain: installed, upgraded and removed apart from any chain of yours.

Every function takes a synchronous `sqlalchemy.Connection` (from async code: ``await conn.run_sync(install)``) and
works in one transaction. On a connection that is in a transaction already it takes part in that and leaves the
commit to its owner; otherwise it begins and commits one of its own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text

from fenceguard.errors import SchemaMissing, TablesStillFenced
from fenceguard.schema.checks import check_dialect, check_server, fenced_tables
from fenceguard.schema.scripts import literal_text, statements

OPTIONS: Final[dict[str, Any]] = {"version_table": "version", "version_table_schema": "fenceguard"}
"""What Alembic is told about the version table."""

_LOCK: Final = 7022359018
"""Key of the advisory lock under which the chain runs: of ten processes at first start one installs."""


@dataclass(frozen=True, slots=True)
class Status:
    """Where a database stands in the chain.

    Attributes:
        current: the newest revision that ran there; `None` when nothing is installed.
        head: the newest revision that this version of fenceguard brings.
        pending: the revisions that an upgrade would run, in order.
    """

    current: str | None
    head: str
    pending: tuple[str, ...]


def migrations_dir() -> Path:
    """Return the chain's folder: in the package when installed from a wheel, beside it when editable."""
    package = Path(__file__).parents[1]
    inside = package / "_migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def install(connection: Connection) -> None:
    """Bring fenceguard's schema to the newest revision; does nothing where it is there.

    Raises:
        StoreUnreachable: the server is no Postgres, or older than Postgres 15; nothing has been changed.
        SchemaMissing: what is installed is newer than this library.
        ValueError: the connection is in AUTOCOMMIT.
    """
    upgrade(connection, "head")


def upgrade(connection: Connection, revision: str) -> None:
    """Run the steps up to `revision`; raises as `install` does, and `ValueError` for an unknown revision."""
    script = _script()
    with _transaction(connection):
        check_server(connection)
        _check_known(script, _current(connection))
        _run(script, lambda rev: script._upgrade_revs(revision, rev), connection=connection)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] as alembic.command


def downgrade(connection: Connection, revision: str) -> None:
    """Take back the steps above `revision`; ``"base"`` removes the schema with its version table.

    Raises:
        TablesStillFenced: tables still have triggers whose functions would go.
        SchemaMissing: nothing is installed, or what is installed is newer than this library.
        ValueError: the revision is unknown, or the connection is in AUTOCOMMIT.
    """
    script = _script()
    with _transaction(connection):
        current = _current(connection)
        if current is None:
            raise SchemaMissing("fenceguard's schema is not installed here", "there is nothing to take back")
        _check_known(script, current)
        if tables := fenced_tables(connection):
            raise TablesStillFenced(tables)
        _run(script, lambda rev: script._downgrade_revs(revision, rev), connection=connection)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] as alembic.command
        if _current(connection) is None:
            connection.execute(text("drop table fenceguard.version"))
            connection.execute(text("drop schema fenceguard"))


def status(connection: Connection) -> Status:
    """Return what is installed and what an upgrade would run; changes nothing."""
    script = _script()
    current = _current(connection)
    known = [found.revision for found in script.walk_revisions()]  # the newest first
    if current is None:
        pending = known
    elif current in known:
        pending = known[: known.index(current)]
    else:  # newer than all of them
        pending = []
    return Status(current, known[0], tuple(reversed(pending)))


def sql() -> str:
    """Return the whole chain as SQL for an empty database, one transaction, as psql runs it."""
    script, printed = _script(), io.StringIO()
    _run(
        script,
        lambda rev: script._upgrade_revs("head", rev),  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] as alembic.command
        dialect_name="postgresql",
        # Without it Alembic doubles every percent sign.
        dialect_opts={"paramstyle": "named"},
        output_buffer=printed,
        as_sql=True,
    )
    return printed.getvalue()


def run(context: MigrationContext) -> None:
    """Run the steps that `context` was made for; what ``migrations/env.py`` and this module share."""

    def execute(step: str) -> None:
        for statement in statements(step):
            context.execute(literal_text(statement))

    context.execute(f"select pg_advisory_xact_lock({_LOCK})")
    context.execute("create schema if not exists fenceguard")
    context.run_migrations(execute=execute)


def _script() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return ScriptDirectory.from_config(config)


def _run(script: ScriptDirectory, steps: Callable[[Any], Any], *, as_sql: bool = False, **options: Any) -> None:
    # Not through alembic.command: its `context` and `op` are globals, and a migration of yours may be using them.
    def plan(heads: Any, _context: MigrationContext) -> Any:
        return steps(heads)

    environment = EnvironmentContext(Config(), script, fn=plan, as_sql=as_sql)
    environment.configure(**options, **OPTIONS)
    context = environment.get_context()
    try:
        with context.begin_transaction():
            run(context)
    except CommandError as error:
        raise ValueError(f"fenceguard's chain: {error}") from error


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection, opts=OPTIONS).get_current_revision()


def _check_known(script: ScriptDirectory, current: str | None) -> None:
    if current is not None and current not in {found.revision for found in script.walk_revisions()}:
        raise SchemaMissing(
            f"fenceguard's schema is at {current}, which this library does not know",
            "upgrade the fenceguard package here",
        )


@contextmanager
def _transaction(connection: Connection) -> Generator[None]:
    check_dialect(connection)
    dbapi = connection.connection.dbapi_connection
    if dbapi is not None and connection.dialect.detect_autocommit_setting(dbapi):
        raise ValueError(
            "the connection is in AUTOCOMMIT, and a chain of migrations needs a transaction: use one without it"
        )
    if connection.in_transaction():
        yield
        return
    with connection.begin():
        # A snapshot older than the lock would not see what another process has just installed.
        connection.execute(text("set transaction isolation level read committed"))
        yield
