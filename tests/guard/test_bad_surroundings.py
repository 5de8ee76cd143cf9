"""Servers that are not there, not ours or not ready: a named error before anything is half done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import Engine, create_engine, select
from support.bank import KEY, Account
from support.services import Services
from support.sql import Connect
from support.urls import driver, place

from fenceguard import AsyncGuard, Guard, SchemaMissing, StoreUnreachable

MakeGuard = Callable[..., Guard]
SECRET = "wrong-and-secret"


@pytest.fixture
def engine_on() -> Iterator[Callable[[str], Engine]]:
    """A factory of engines for URLs of the test's choice."""
    engines: list[Engine] = []

    def make(url: str) -> Engine:
        engines.append(create_engine(driver(url, "psycopg")))
        return engines[-1]

    yield make
    for engine in engines:
        engine.dispose()


def nothing_is_leased(redis_client: Redis, prefix: str) -> bool:
    return redis_client.keys(f"{prefix}*:lease") == []


def test_no_postgres_server_is_named_and_the_lease_is_given_back(
    make_guard: MakeGuard, engine_on: Callable[[str], Engine], redis_client: Redis, prefix: str
) -> None:
    guard = make_guard(engine=engine_on("postgresql://app@127.0.0.1:1/app"))
    with pytest.raises(StoreUnreachable, match="127.0.0.1") as caught, guard.hold(KEY):
        pass
    assert caught.value.store == "postgres"
    assert nothing_is_leased(redis_client, prefix)


def test_a_refused_login_to_postgres_is_named_without_its_password(
    make_guard: MakeGuard,
    engine_on: Callable[[str], Engine],
    own_postgres: Callable[..., Any],
    redis_client: Redis,
    prefix: str,
) -> None:
    server = own_postgres()
    guard = make_guard(engine=engine_on(server.url.replace(server.password, SECRET)))
    with pytest.raises(StoreUnreachable, match="postgres") as caught, guard.hold(KEY):
        pass
    assert SECRET not in str(caught.value)
    assert nothing_is_leased(redis_client, prefix)


def test_a_refused_login_to_redis_is_named_without_its_password(
    make_guard: MakeGuard, own_redis: Any, engine: Engine
) -> None:
    with Redis(host="127.0.0.1", port=own_redis.port, password=SECRET) as client:
        guard = make_guard(redis=client)
        with pytest.raises(StoreUnreachable, match="redis") as caught, guard.hold(KEY):
            pass
    assert SECRET not in str(caught.value)


def test_a_server_that_is_no_redis_is_named(make_guard: MakeGuard, services: Services, engine: Engine) -> None:
    host, port = place(services.postgres_url)
    with Redis(host=host, port=port) as client:
        guard = make_guard(redis=client, ttl=1.0)
        with pytest.raises(StoreUnreachable, match=f"{host}:{port}") as caught, guard.hold(KEY):
            pass
    assert caught.value.store == "redis"


def test_a_missing_schema_is_named_with_the_command_that_installs_it(
    make_guard: MakeGuard,
    engine_on: Callable[[str], Engine],
    empty_database_url: str,
    redis_client: Redis,
    prefix: str,
) -> None:
    guard = make_guard(engine=engine_on(empty_database_url))
    with pytest.raises(SchemaMissing, match="fenceguard migrate up"), guard.hold(KEY):
        pass
    assert nothing_is_leased(redis_client, prefix)


async def test_a_missing_schema_is_named_on_the_async_side_too(
    make_async_guard: Callable[..., AsyncGuard], empty_database_url: str
) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 beside its one use

    engine = create_async_engine(driver(empty_database_url, "asyncpg"))
    guard = make_async_guard(engine=engine)
    with pytest.raises(SchemaMissing, match="fenceguard migrate up"):
        async with guard.hold(KEY):
            pass
    await guard.close()
    await engine.dispose()


@pytest.mark.parametrize(
    ("version", "remedy"), [("0000", "fenceguard migrate up"), ("9999", "upgrade the fenceguard package")]
)
def test_a_schema_of_another_version_is_named_with_what_helps(
    make_guard: MakeGuard, pg: Connect, version: str, remedy: str
) -> None:
    pg().execute(
        "create or replace function fenceguard.version() returns text language sql immutable parallel safe "
        f"return '{version}'"
    )
    with pytest.raises(SchemaMissing, match=remedy), make_guard().hold(KEY):
        pass


def test_a_table_without_its_fence_is_named_with_the_operation_that_adds_it(
    make_guard: MakeGuard, pg: Connect
) -> None:
    pg().execute("create table account (id bigint primary key, balance bigint not null)")
    guard = make_guard()
    with (
        pytest.raises(SchemaMissing, match="op.add_fence") as caught,
        guard.hold(KEY),
        guard.sessions()() as session,
    ):
        session.execute(select(Account))
    assert "account" in caught.value.problem
