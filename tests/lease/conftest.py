"""Fixtures of the lease's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from lease_faces import KINDS, Face, Far, Kind, Loop, R
from support.proxy import Proxy
from support.services import Services
from support.urls import at_port, place


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def face(kind: Kind, services: Services, prefix: str) -> Iterator[Callable[..., Face]]:
    """A factory of clients of the test's kind: ``face(url=…, ttl=…)``."""
    with ExitStack() as stack:
        loop = None if kind == "sync" else Loop()
        if loop is not None:
            stack.callback(loop.close)

        def make(*, url: str = services.redis_url, **options: Any) -> Face:
            made = Face(kind, url, loop, **{"prefix": prefix, **options})
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def far(proxy: Callable[[str, int], Proxy], services: Services) -> Far:
    """The run's Redis behind a proxy: ``far.link`` and ``far.url``."""
    link = proxy(*place(services.redis_url))
    return Far(link, at_port(services.redis_url, link.port))


@pytest.fixture
def key(prefix: str) -> str:
    """The lease key of `R`."""
    return f"{prefix}:{{{R}}}:lease"
