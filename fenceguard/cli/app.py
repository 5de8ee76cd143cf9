"""The commands and their options; what they do lives in a module each, imported when the command runs."""

from __future__ import annotations

import sys
from typing import Annotated, TypeAlias

import typer

from fenceguard.cli._output import complain, say
from fenceguard.cli._settings import UsageError
from fenceguard.errors import FenceguardError

PostgresUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--postgres",
        metavar="URL",
        help="Database; else FENCEGUARD_POSTGRES_URL, else postgres under [tool.fenceguard] in pyproject.toml.",
    ),
]
RedisUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="Redis or Valkey; else FENCEGUARD_REDIS_URL, else redis under [tool.fenceguard] in pyproject.toml.",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

app = typer.Typer(
    name="fenceguard",
    help="Fenced writes for Postgres: a stale lease holder's write is refused by the database itself.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # it would take [tool.fenceguard] for markup
    pretty_exceptions_enable=False,  # it would print local variables, URLs among them
)
migrate = typer.Typer(
    help="fenceguard's own schema: install, upgrade, look at, remove.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(migrate, name="migrate")


def run() -> None:
    """Run the command that `sys.argv` names; `FenceguardError` ends it with 1, `UsageError` with 2."""
    try:
        app()
    except UsageError as error:
        complain(error)
        raise SystemExit(2) from None
    except FenceguardError as error:
        complain(error)
        raise SystemExit(1) from None


def _print_version(wanted: bool) -> None:  # noqa: FBT001 the signature of an option's callback
    if wanted:
        from fenceguard import __version__  # noqa: PLC0415 see the module's docstring

        say(__version__)
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command()
def demo(*, postgres: PostgresUrl = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Watch Postgres refuse a stale write that a Redis lease alone lets through.

    Two real worker processes, one of them frozen past the end of its lease, beside the same run without the
    fence. Uses a private Postgres and Valkey, or the servers of the given URLs, which it leaves as they were.
    Exits with 0 when the fenced run lost nothing and the other one did.
    """
    from fenceguard.cli import demo as command  # noqa: PLC0415 see the module's docstring

    sys.exit(command.main(postgres=postgres, redis=redis, as_json=json))


@migrate.command()
def up(
    revision: Annotated[str, typer.Argument(metavar="REV", help="Up to here; by default the newest.")] = "head",
    *,
    postgres: PostgresUrl = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the SQL instead; needs no database.")] = False,
    json: Json = False,
) -> None:
    """Install fenceguard's schema, or bring it up to a revision."""
    from fenceguard.cli import migrate as command  # noqa: PLC0415 see the module's docstring

    if sql:
        command.print_sql(revision, as_json=json)
    else:
        command.up(revision, postgres=postgres, as_json=json)


@migrate.command()
def down(
    revision: Annotated[str, typer.Argument(metavar="REV", help="Down to here; `base` removes everything.")],
    *,
    postgres: PostgresUrl = None,
    json: Json = False,
) -> None:
    """Take fenceguard's schema back to a revision; `base` removes it, and what it knows of every fence."""
    from fenceguard.cli import migrate as command  # noqa: PLC0415 see the module's docstring

    command.down(revision, postgres=postgres, as_json=json)


@migrate.command()
def status(*, postgres: PostgresUrl = None, json: Json = False) -> None:
    """Show which revision the database has and which one this version of fenceguard needs."""
    from fenceguard.cli import migrate as command  # noqa: PLC0415 see the module's docstring

    command.status(postgres=postgres, as_json=json)
