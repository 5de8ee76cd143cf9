"""Raw SQL over psycopg: announcing, claiming, being refused, and waiting for a lock without sleeping on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias

import psycopg

from support.waiting import until

Connection: TypeAlias = psycopg.Connection[Any]
Connect: TypeAlias = Callable[..., Connection]


def claim(connection: Connection, resource: str, token: int, owner: str = "a", wait_ms: int | None = None) -> int:
    row = connection.execute(
        "select fenceguard.claim(%s, %s, %s, %s)", (resource, token, owner, wait_ms)
    ).fetchone()
    assert row is not None
    return row[0]


def grants(*held: tuple[str, int] | tuple[str, int, str]) -> str:
    """Return the announcement of grants, each ``(resource, token)``, of owner ``"a"``, or with its owner."""
    held_as = {resource: {"token": token, "owner": (*rest, "a")[0]} for resource, token, *rest in held}
    return json.dumps(held_as, ensure_ascii=False)


def announce(connection: Connection, *held: tuple[str, int] | tuple[str, int, str]) -> None:
    """Announce in the open transaction; nothing held announces nothing."""
    connection.execute("select set_config('fenceguard.grants', %s, true)", (grants(*held) if held else "",))


@contextmanager
def writing(
    connection: Connection, *held: tuple[str, int] | tuple[str, int, str], isolation: str = "read committed"
) -> Iterator[Connection]:
    """A transaction that announces what is held; commits at its end, rolls back on an error."""
    connection.execute(f"begin isolation level {isolation}")
    try:
        announce(connection, *held)
        yield connection
    except BaseException:
        connection.execute("rollback")
        raise
    connection.execute("commit")


def refusal(connection: Connection, query: str, *parameters: Any) -> psycopg.Error | None:
    """Run `query` and return what the server answered when it refused, `None` when it did not."""
    try:
        connection.execute(query, parameters or None)
    except psycopg.Error as error:
        return error
    return None


def sqlstate(connection: Connection, query: str, *parameters: Any) -> str | None:
    """Run `query` and return the SQLSTATE with which the server refused it, `None` when it did not."""
    error = refusal(connection, query, *parameters)
    return None if error is None else error.sqlstate


def detail(error: psycopg.Error | None) -> dict[str, Any]:
    """Return the members of a refusal's DETAIL."""
    assert error is not None
    assert error.diag.message_detail is not None, error
    return json.loads(error.diag.message_detail)


def until_waiting(observer: Connection, waiter: Connection) -> None:
    """Wait until `waiter`'s backend waits for a lock, as `observer` sees it."""
    pid = waiter.info.backend_pid

    def waits() -> bool:
        row = observer.execute("select from pg_locks where pid = %s and not granted", (pid,)).fetchone()
        return row is not None

    until(waits, "a wait for a lock")


@contextmanager
def in_background() -> Iterator[Callable[..., Future[Any]]]:
    """A submit function; what is submitted has ended when the block has: it is cancelled when the block fails."""
    used: list[Connection] = []

    def submit(act: Callable[..., Any], *arguments: Any) -> Future[Any]:
        used.extend(
            one for one in (getattr(act, "__self__", None), *arguments) if isinstance(one, psycopg.Connection)
        )
        return pool.submit(act, *arguments)

    with ThreadPoolExecutor(max_workers=32) as pool:
        try:
            yield submit
        except BaseException:
            for connection in used:
                connection.cancel_safe()
            raise


def scalar(connection: Connection, query: str, *parameters: Any) -> Any:
    row = connection.execute(query, parameters or None).fetchone()
    return None if row is None else row[0]
