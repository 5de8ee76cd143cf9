"""Fixtures on real servers; see `support.services` for how they are chosen."""

from __future__ import annotations

import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
import redis.asyncio
from hypothesis import settings
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from support import services as chosen
from support.proxy import Proxy
from support.services import Services
from support.urls import driver
from support.workers import Worker

from fenceguard import embedded

# The same examples in every run, and no verdict on a slow machine.
settings.register_profile("steady", derandomize=True, database=None, deadline=None)
settings.load_profile("steady")

pytest_plugins = ["support.guarded", "support.left_out", "support.matrix"]

_KIND = pytest.StashKey[str]()
_STACK = pytest.StashKey[ExitStack]()
_SERVICES = pytest.StashKey[Services]()


# -- one pair of servers per run, started when first needed; under xdist by the controller for all workers


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts its background jobs with SIGINT ignored, and the children whom some tests interrupt inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_STACK] = ExitStack()
    handed: dict[str, Any] | None = getattr(config, "workerinput", {}).get("fenceguard_services")
    if handed is not None:
        config.stash[_SERVICES] = Services(**handed)
    else:
        config.stash[_KIND] = chosen.choose()


def pytest_report_header(config: pytest.Config) -> str:
    return f"fenceguard services: {config.stash.get(_KIND, 'from the controller')}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["fenceguard_services"] = _services(node.config).to_worker()


def pytest_unconfigure(config: pytest.Config) -> None:
    if _STACK in config.stash:
        config.stash[_STACK].close()


def _services(config: pytest.Config) -> Services:
    if _SERVICES not in config.stash:
        config.stash[_SERVICES] = config.stash[_STACK].enter_context(chosen.running(config.stash[_KIND]))
    return config.stash[_SERVICES]


@pytest.fixture(scope="session")
def services(request: pytest.FixtureRequest) -> Services:
    """The run's servers: `.postgres_url` (a superuser's, no driver), `.redis_url`, `.kind`."""
    return _services(request.config)


# -- Postgres


@pytest.fixture
def database_url(services: Services) -> Iterator[str]:
    """A fresh database with fenceguard's schema."""
    with services.database(services.make_template()) as url:
        yield url


@pytest.fixture
def empty_database_url(services: Services) -> Iterator[str]:
    """A fresh database without it."""
    with services.database() as url:
        yield url


@pytest.fixture
def pg(database_url: str) -> Iterator[Callable[..., psycopg.Connection[Any]]]:
    """A factory of autocommit connections; arguments as `psycopg.connect`'s."""
    with ExitStack() as stack:

        def connect(**arguments: Any) -> psycopg.Connection[Any]:
            connection = psycopg.connect(database_url, **{"autocommit": True, **arguments})
            stack.callback(connection.close)
            return connection

        yield connect


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(driver(database_url, "psycopg"))
    yield engine
    engine.dispose()


@pytest.fixture
async def async_engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(driver(database_url, "asyncpg"))
    yield engine
    await engine.dispose()


# -- Redis


@pytest.fixture
def prefix() -> str:
    """A key prefix of the test's own."""
    return f"fg-{secrets.token_hex(6)}"


@pytest.fixture
def redis_client(services: Services) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(services.redis_url, decode_responses=False) as client:
        yield client


@pytest.fixture
async def async_redis(services: Services) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(services.redis_url) as client:
        yield client


# -- servers of a test's own: to be killed, restarted, flushed, frozen


@pytest.fixture
def own_redis() -> Iterator[embedded.Server]:
    """A private Valkey: `.url .port .pid`, `.kill()`, `.restart()` (comes back empty), `.stop()`."""
    with embedded.valkey() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[Callable[..., embedded.Server]]:
    """A factory of private Postgres servers, by settings: `.url`, `.kill()`, `.restart()`, `.stop()`."""
    with ExitStack() as stack:

        def start(**settings: str) -> embedded.Server:
            return stack.enter_context(embedded.postgres(settings=settings))

        yield start


# -- faults, folders, processes


@pytest.fixture
def proxy() -> Iterator[Callable[[str, int], Proxy]]:
    """A factory of proxies: ``proxy(host, port)``; see `support.urls.place` and `at_port`."""
    with ExitStack() as stack:

        def start(host: str, port: int) -> Proxy:
            return stack.enter_context(Proxy(host, port))

        yield start


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter and write to, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="fg-test-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    """A factory of child processes: ``worker("support.some_worker", "argument", env={…})``."""
    with ExitStack() as stack:

        def start(target: str | Path, *arguments: str, env: dict[str, str] | None = None) -> Worker:
            child = Worker(target, *arguments, env=env)
            stack.callback(child.close)
            return child

        yield start
