"""The tools that other tests break things with do what they say."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from support.proxy import Proxy
from support.services import Services
from support.urls import at_port, place
from support.waiting import until
from support.workers import Worker, WorkerEnded


@pytest.fixture
def link(services: Services, proxy: Callable[[str, int], Proxy]) -> Proxy:
    return proxy(*place(services.redis_url))


@pytest.fixture
def through(services: Services, link: Proxy) -> Iterator[redis.Redis]:
    """A client behind the proxy, that gives up after half a second and tries nothing twice."""
    url = at_port(services.redis_url, link.port)
    with redis.Redis.from_url(url, socket_timeout=0.5, retry=Retry(NoBackoff(), 0)) as client:
        yield client


def test_a_frozen_link_holds_a_request_back_and_delivers_it_after_the_thaw(
    link: Proxy, through: redis.Redis, redis_client: redis.Redis, prefix: str
) -> None:
    through.ping()
    link.freeze()
    with pytest.raises(redis.TimeoutError):
        through.set(prefix, "late", ex=60)
    before = redis_client.get(prefix)
    link.thaw()
    until(lambda: redis_client.get(prefix), "the request that was held back")
    assert before is None


def test_a_frozen_link_answers_no_newcomer(link: Proxy, through: redis.Redis) -> None:
    link.freeze()
    with pytest.raises(redis.TimeoutError):
        through.ping()
    link.thaw()
    assert through.ping()


def test_a_cut_link_resets_its_connections_and_serves_new_ones(link: Proxy, through: redis.Redis) -> None:
    with socket.create_connection(("127.0.0.1", link.port), 5) as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(100)
        link.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(100)
    assert through.ping()


def test_a_swallowed_reply_is_lost_after_its_request_was_served(
    link: Proxy, through: redis.Redis, redis_client: redis.Redis, prefix: str
) -> None:
    through.ping()
    link.swallow_next_reply()
    with pytest.raises(redis.ConnectionError):
        through.set(prefix, "served", ex=60)
    link.wait_swallowed(0)
    assert redis_client.get(prefix) == b"served"
    assert through.ping()


def test_a_delayed_link_takes_its_time_both_ways(link: Proxy, through: redis.Redis) -> None:
    through.ping()
    link.delay = 0.1
    began = time.monotonic()
    through.ping()
    assert time.monotonic() - began >= 0.2


ECHO = "import sys\nfor line in sys.stdin:\n    print(line.strip(), flush=True)\n"


@pytest.fixture
def echo(worker: Callable[..., Worker], tmp_path: Path) -> Worker:
    (tmp_path / "echo.py").write_text(ECHO)
    return worker(tmp_path / "echo.py")


def test_a_frozen_worker_says_nothing_until_it_is_thawed(echo: Worker) -> None:
    echo.say("one")
    assert echo.hear() == "one"
    echo.freeze()
    echo.say("two")
    with pytest.raises(WorkerEnded, match=r"said nothing for 0\.2 s"):
        echo.hear(0.2)
    echo.thaw()
    assert echo.hear() == "two"
    assert echo.wait() == 0


def test_a_frozen_worker_can_be_killed(echo: Worker) -> None:
    echo.freeze()
    echo.kill()
    assert echo.returncode == -9
    with pytest.raises(WorkerEnded, match="ended with -9"):
        echo.hear()


def test_a_worker_that_fails_is_quoted(worker: Callable[..., Worker], tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('as planned')\n")
    process = worker(tmp_path / "fails.py")
    with pytest.raises(WorkerEnded, match="ValueError: as planned"):
        process.hear()
    with pytest.raises(WorkerEnded, match="before it could be frozen"):
        process.freeze()
