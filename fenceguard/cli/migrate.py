"""`fenceguard migrate`: fenceguard's own schema, apart from any chain of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fenceguard import schema
from fenceguard.cli._output import say, say_json
from fenceguard.cli._settings import Url, UsageError, need
from fenceguard.cli._stores import on_database

if TYPE_CHECKING:
    from sqlalchemy import Connection


def up(revision: str, *, postgres: str | None, as_json: bool) -> None:
    """Install or upgrade, and print what was done; raises as `fenceguard.schema.upgrade` and `UsageError`."""
    _move(lambda connection: schema.upgrade(connection, revision), postgres, as_json=as_json)


def down(revision: str, *, postgres: str | None, as_json: bool) -> None:
    """Take back, and print what was done; raises as `fenceguard.schema.downgrade` and `UsageError`."""
    _move(lambda connection: schema.downgrade(connection, revision), postgres, as_json=as_json)


def status(*, postgres: str | None, as_json: bool) -> None:
    """Print where the database stands; raises `StoreUnreachable` and `UsageError`."""
    url = need("postgres", postgres)
    found = on_database(url, schema.status)
    if as_json:
        say_json(
            {
                "database": url.shown,
                "state": _state(found),
                "current": found.current,
                "head": found.head,
                "pending": list(found.pending),
            }
        )
    else:
        say(f"database   {url.shown}")
        say(f"installed  {_name(found.current)}")
        say(f"newest     {found.head}")
        say(f"state      {_STATES[_state(found)]}")


def print_sql(revision: str, *, as_json: bool) -> None:
    """Print the whole chain as SQL for psql; raises `UsageError` for a part of it."""
    if revision != "head":
        raise UsageError("--sql prints the whole chain, for an empty database: leave REV out")
    text = schema.sql()
    if as_json:
        say_json({"sql": text})
    else:
        say(text.rstrip("\n"))


def _move(step: Callable[[Connection], None], postgres: str | None, *, as_json: bool) -> None:
    url = need("postgres", postgres)

    def work(connection: Connection) -> tuple[str | None, str | None]:
        before = schema.status(connection).current
        connection.rollback()  # so that the step has a transaction of its own, and commits it
        try:
            step(connection)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return before, schema.status(connection).current

    before, after = on_database(url, work)
    if as_json:
        say_json({"database": url.shown, "before": before, "after": after})
    else:
        say(_moved(url, before, after))


def _moved(url: Url, before: str | None, after: str | None) -> str:
    if before == after:
        return f"{url.shown}: fenceguard's schema is at {_name(after)} already"
    return f"{url.shown}: fenceguard's schema went from {_name(before)} to {_name(after)}"


def _name(revision: str | None) -> str:
    return revision or "nothing"


_STATES = {
    "missing": "missing: run `fenceguard migrate up`",
    "behind": "behind: run `fenceguard migrate up`",
    "current": "current",
    "ahead": "ahead: upgrade the fenceguard package here",
}


def _state(found: schema.Status) -> str:
    if found.current is None:
        return "missing"
    if found.pending:
        return "behind"
    return "current" if found.current == found.head else "ahead"
