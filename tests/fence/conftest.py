"""The bank of `support.bank`, and engines of each driver under one test.

A test that takes `any_engine` runs on psycopg, on asyncpg and on async psycopg, or on those that its module names
in `DRIVERS`. Its body is sync: for the async drivers it runs in a greenlet, as SQLAlchemy runs every method of an
`AsyncSession`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fence_talk import Holds
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.util import greenlet_spawn
from support.urls import driver

from fenceguard.fence.session import attach

DRIVERS = ("psycopg", "asyncpg", "psycopg_async")


@pytest.fixture
def holds() -> Holds:
    return Holds()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on each driver, or on those that its module names as `DRIVERS`."""
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "any_engine" in metafunc.fixturenames and "any_engine" not in named:
        metafunc.parametrize("any_engine", getattr(metafunc.module, "DRIVERS", DRIVERS), indirect=True)


@pytest.fixture
def any_engine(request: pytest.FixtureRequest, database_url: str) -> Iterator[Engine]:
    if request.param == "psycopg":
        engine = create_engine(driver(database_url, "psycopg"))
        yield engine
        engine.dispose()
    else:
        yield create_async_engine(driver(database_url, request.param)).sync_engine


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    engine = pyfuncitem.funcargs.get("any_engine")
    if engine is not None and engine.dialect.is_async:
        pyfuncitem.obj = _in_greenlet(pyfuncitem.obj, engine)
    return (yield)


def _in_greenlet(test: Callable[..., None], engine: Engine) -> Callable[..., None]:
    # The signature tells pytest which fixtures the test takes.
    def run(**arguments: Any) -> None:
        async def main() -> None:
            try:
                await greenlet_spawn(test, **arguments)
            finally:
                await greenlet_spawn(engine.dispose)

        asyncio.run(main())

    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined] # as functools.wraps
    return run


@pytest.fixture
def attached(any_engine: Engine, holds: Holds) -> Engine:
    """`any_engine`, announcing what `holds` holds."""
    attach(any_engine, holds)
    return any_engine
