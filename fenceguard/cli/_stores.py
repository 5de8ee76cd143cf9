"""Clients for the URLs that commands are given.

A library's user hands in an engine and a redis client; on the command line there are only URLs, so this is the one
module of the command line that makes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeVar

from fenceguard.cli._settings import Url, UsageError
from fenceguard.errors import StoreUnreachable

if TYPE_CHECKING:
    from redis import Redis
    from sqlalchemy import URL, Connection, Engine

T = TypeVar("T")

CONNECT_WITHIN: Final = 10
"""Seconds within which a server must take a connection."""


def on_database(url: Url, work: Callable[[Connection], T]) -> T:
    """Return ``work(connection)`` on a connection of its own, with whichever driver the URL names.

    A plain ``postgresql://`` takes psycopg where it is installed, else asyncpg.

    Raises:
        StoreUnreachable: no server, a refused login, or a statement that the server refused.
        UsageError: the driver is unknown or not installed.
    """
    address = _address(url)
    with reaching(url):
        if address.get_dialect().is_async:
            return asyncio.run(_on_async(address, work))
        engine = engine_for(url)
        try:
            with engine.connect() as connection:
                return work(connection)
        finally:
            engine.dispose()


async def _on_async(address: URL, work: Callable[[Connection], T]) -> T:
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 only where it is needed

    engine = create_async_engine(address, connect_args=_limits(address, "timeout"))
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(work)
    finally:
        await engine.dispose()


def engine_for(url: Url) -> Engine:
    """Return a sync engine; raises `UsageError` when the URL's driver is unknown or not installed."""
    from sqlalchemy import create_engine  # noqa: PLC0415 only where it is needed

    address = _address(url)
    return create_engine(address, connect_args=_limits(address, "connect_timeout"))


def _limits(address: URL, name: str) -> dict[str, int]:
    return {} if name in address.query else {name: CONNECT_WITHIN}


def _address(url: Url) -> URL:
    """Return SQLAlchemy's URL with a driver that can be imported."""
    from sqlalchemy import make_url  # noqa: PLC0415 only where it is needed
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415 as above

    try:
        address = make_url(url.text)
    except (ArgumentError, ValueError):
        raise UsageError(f"the postgres URL from {url.source} is malformed") from None
    if "+" not in address.drivername:
        address = address.set(drivername=f"postgresql+{_default_driver()}")
    try:
        address.get_dialect().import_dbapi()
    except (ArgumentError, ImportError) as error:
        raise UsageError(f"the driver of {address.drivername} from {url.source} is not there: {error}") from None
    return address


def _default_driver() -> str:
    try:
        import_module("psycopg")  # which may be there without the libpq that it needs
    except ImportError:
        return "asyncpg"
    return "psycopg"


def redis_for(url: Url) -> Redis:
    """Return a client, which has not connected yet."""
    from redis import Redis  # noqa: PLC0415 only where it is needed

    try:
        return Redis.from_url(  # pyright: ignore[reportUnknownMemberType] its **kwargs have no type
            url.text, socket_connect_timeout=CONNECT_WITHIN, socket_timeout=CONNECT_WITHIN
        )
    except ValueError:
        raise UsageError(f"the redis URL from {url.source} is malformed") from None


def ping(url: Url, client: Redis) -> None:
    """Return when the server of `client`, which is `url`'s, has answered; raises `StoreUnreachable`."""
    with reaching(url):
        client.ping()  # pyright: ignore[reportUnknownMemberType] its **kwargs have no type


@contextmanager
def reaching(url: Url) -> Generator[None]:
    """Turn a driver's error inside the block into `StoreUnreachable`, which names the server and no password."""
    try:
        yield
    except _driver_errors() as error:
        said = getattr(error, "orig", None) or error
        # Not `from error`: a driver may keep the URL in the error's arguments, and a traceback would print them.
        text = url.scrub(said) or type(said).__name__
        raise StoreUnreachable(url.store, f"{url.shown} (from {url.source}): {text}") from None


def _driver_errors() -> tuple[type[Exception], ...]:
    from redis import RedisError  # noqa: PLC0415 only where it is needed
    from sqlalchemy.exc import DBAPIError  # noqa: PLC0415 as above

    return OSError, DBAPIError, RedisError
