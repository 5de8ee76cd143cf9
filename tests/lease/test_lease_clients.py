"""Both clients beside their protocol: what they are given, what they say of it, what they leave behind."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from lease_faces import Face, R
from support.services import Services
from support.urls import at_port, place, with_password

import fenceguard.lease
from fenceguard.errors import StoreUnreachable
from fenceguard.lease import AsyncLeaseClient, LeaseClient, protocol

Faces = Callable[..., Face]
ROOM = Path(fenceguard.lease.__file__).parent


# -- sync and async


def calls(client: type) -> dict[str, inspect.Signature]:
    return {name: inspect.signature(member) for name, member in vars(client).items() if not name.startswith("_")}


def without(signature: inspect.Signature, name: str) -> inspect.Signature:
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name != name])


def test_both_clients_have_the_same_methods_and_signatures() -> None:
    there, here = calls(AsyncLeaseClient), calls(LeaseClient)
    heartbeat = without(there.pop("heartbeat"), "carrier")
    assert heartbeat.parameters == here.pop("heartbeat").parameters
    assert there == here
    assert inspect.signature(AsyncLeaseClient) == inspect.signature(LeaseClient)


def test_every_call_of_the_async_client_is_awaited_and_none_of_the_sync_one() -> None:
    for name in calls(LeaseClient).keys() - {"heartbeat"}:
        assert inspect.iscoroutinefunction(getattr(AsyncLeaseClient, name))
        assert not inspect.iscoroutinefunction(getattr(LeaseClient, name))


# -- what is loaded


def test_only_the_two_client_modules_import_redis() -> None:
    importers = set()
    for module in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "redis" for name in names):
                importers.add(module.name)
    assert importers == {"client.py", "aio.py"}


def test_the_lease_alone_loads_no_sqlalchemy() -> None:
    code = "import sys; from fenceguard.lease import LeaseClient; print('sqlalchemy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


# -- what is misuse


@pytest.fixture(params=[(LeaseClient, redis.Redis), (AsyncLeaseClient, redis.asyncio.Redis)], ids=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A factory of clients that connect to nothing."""
    client, given = request.param
    return lambda **options: client(given(), **options)


def test_a_renewal_interval_nearly_as_long_as_the_ttl_is_refused_with_the_rule(make: Callable[..., Any]) -> None:
    """redbeat#230."""
    with pytest.raises(
        ValueError, match=r"renew_every must be above 0 and at most ttl/3 \(10 s for ttl=30\), not 29"
    ):
        make(ttl=30.0, renew_every=29.0)


@pytest.mark.parametrize(
    ("timing", "rule"),
    [
        ({"ttl": 0.05}, "ttl must be a finite number of seconds, at least 0.1"),
        ({"ttl": float("nan")}, "ttl must be"),
        ({"ttl": float("inf")}, "ttl must be"),
        ({"renew_every": 0.0}, "renew_every must be above 0"),
        ({"safety": 0.0}, "safety must be above 0"),
        ({"safety": 20.0}, "safety must be above 0 and below ttl - renew_every"),
    ],
)
def test_a_timing_that_breaks_its_rule_is_refused_with_it(
    make: Callable[..., Any], timing: dict[str, float], rule: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(rule)):
        make(**timing)


@pytest.mark.parametrize("prefix", ["", "a{b", "a}b", "a\nb", "\x00"])
def test_a_prefix_that_would_break_the_keys_is_refused(make: Callable[..., Any], prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        make(prefix=prefix)


def test_a_label_that_makes_no_owner_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="owner"):
        make(owner="a\nb")


@pytest.mark.parametrize(
    ("client", "given", "says"),
    [
        (LeaseClient, redis.asyncio.Redis(), "LeaseClient needs a client of type redis.Redis"),
        (LeaseClient, "redis://localhost", "not str"),
        (AsyncLeaseClient, redis.Redis(), "AsyncLeaseClient needs a client of type redis.asyncio.Redis"),
        (AsyncLeaseClient, None, "not NoneType"),
    ],
)
def test_the_wrong_kind_of_redis_client_is_named(client: Any, given: Any, says: str) -> None:
    with pytest.raises(TypeError, match=re.escape(says)):
        client(given)


@pytest.mark.parametrize("resource", ["", "a\x00b", "a\nb", "x" * 513, "é" * 257, "\ud800"])
def test_a_name_that_is_no_resource_is_refused_before_anything_is_asked(face: Faces, resource: str) -> None:
    client = face(url="redis://127.0.0.1:1/0")  # nobody is there to be asked
    for ask_for in (client.try_acquire, client.inspect):
        with pytest.raises(ValueError, match="resource"):
            ask_for(resource)


def test_timing_and_clock_can_be_read(make: Callable[..., Any]) -> None:
    client = make(ttl=1.5)
    assert (client.timing.ttl, client.timing.renew_every, client.timing.safety) == (1.5, 0.5, 0.15)
    assert client.clock() > 0


# -- servers that are of no use


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port on which nobody listens, and nobody will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


class OtherServer:
    """Answers whatever it is told with one text, and counts who connects."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self.connections = 0
        self._answer, self._over = answer, threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.02)
        self.url = f"redis://:a-secret@127.0.0.1:{self._server.getsockname()[1]}/0"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                link, _ = self._server.accept()
            except TimeoutError:
                continue
            self.connections += 1
            with link:
                link.sendall(self._answer(link.recv(4096)))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._server.close()


@pytest.fixture
def other_server() -> Iterator[Callable[..., OtherServer]]:
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[bytes], bytes]) -> OtherServer:
            server = OtherServer(answer)
            stack.callback(server.close)
            return server

        yield start


def problem(client: Face, resource: str = R) -> str:
    """What the client says, which is the same for all it is asked, and pickles."""
    with pytest.raises(StoreUnreachable) as caught:
        client.try_acquire(resource)
    again: StoreUnreachable = pickle.loads(pickle.dumps(caught.value))
    assert (again.store, again.problem) == ("redis", caught.value.problem)
    return str(again)


def test_no_server(face: Faces, nobody: int) -> None:
    said = problem(face(url=f"redis://:secret@127.0.0.1:{nobody}/0"))
    assert f"no connection to 127.0.0.1:{nobody} that works" in said
    assert "Error 111" in said  # refused
    assert "secret" not in said


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 64 + ".invalid"])
def test_a_host_that_does_not_exist(face: Faces, host: str) -> None:
    assert f"no connection to {host}:6379 that works" in problem(face(url=f"redis://{host}:6379/0"))


def test_a_wrong_password_is_not_printed(face: Faces, services: Services) -> None:
    said = problem(face(url=with_password(services.redis_url, "a-wrong-secret")))
    host, port = place(services.redis_url)
    assert f"{host}:{port} refused the login" in said
    assert "a-wrong-secret" not in said


def test_a_password_that_the_server_repeats_is_not_printed(
    face: Faces, other_server: Callable[..., OtherServer]
) -> None:
    said = problem(face(url=other_server(lambda told: b"-ERR what is " + b" ".join(told.split()) + b"\r\n").url))
    assert "what is" in said
    assert "a-secret" not in said


def test_a_server_that_is_postgres(face: Faces, services: Services) -> None:
    host, port = place(services.postgres_url)
    said = problem(face(url=f"redis://{host}:{port}/0"))
    assert f"no connection to {host}:{port} that works" in said
    assert "a Redis server?" in said


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":abc\r\n", b"\x00\xff\r\n", b"*1\r\n"])
def test_a_server_of_another_protocol(face: Faces, other_server: Callable[..., OtherServer], answer: bytes) -> None:
    server = other_server(lambda _: answer)
    said = problem(face(url=server.url))
    assert server.url.rpartition("@")[2].partition("/")[0] in said
    assert "Redis" in said.partition(":")[2]


def test_a_question_is_asked_as_often_as_the_protocol_says_and_not_again_by_redis_py(
    other_server: Callable[..., OtherServer],
) -> None:
    server = other_server(lambda _: b"")
    with redis.Redis(**redis.connection.parse_url(server.url)) as given:
        assert given.get_retry().get_retries() > 1  # by which it would
        with pytest.raises(StoreUnreachable):
            LeaseClient(given).try_acquire(R)
    assert server.connections == 2 * protocol.ATTEMPTS  # to acquire, and to give back


def test_a_database_number_that_does_not_exist(face: Faces, services: Services) -> None:
    said = problem(face(url=services.redis_url.rpartition("/")[0] + "/9999"))
    assert "out of range" in said


def test_a_key_of_another_type_is_told_as_redis_tells_it(
    face: Faces, redis_client: redis.Redis, prefix: str
) -> None:
    redis_client.rpush(f"{prefix}:{{{R}}}:lease", "x")
    said = problem(face())
    assert "WRONGTYPE" in said
    assert not redis_client.exists(f"{prefix}:{{{R}}}:token")


def test_a_server_that_accepts_and_says_nothing_is_given_up_in_time(face: Faces) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        said = problem(face(url=f"redis://127.0.0.1:{silent.getsockname()[1]}/0", ttl=0.6))
    assert "did not answer in time" in said


def test_a_replica_is_named_as_one(face: Faces, own_redis: Any) -> None:
    with redis.Redis.from_url(own_redis.url) as admin:
        admin.replicaof("127.0.0.1", 1)
        assert "is a read-only replica" in problem(face(url=own_redis.url))


def test_a_server_without_memory_is_named_as_one(face: Faces, own_redis: Any) -> None:
    with redis.Redis.from_url(own_redis.url) as admin:
        admin.config_set("maxmemory", "1")
        said = problem(face(url=own_redis.url))
        assert "has no memory left" in said
        assert admin.keys("*") == []


# -- the given client


def test_the_given_client_and_its_settings_are_left_alone(services: Services, prefix: str) -> None:
    with redis.Redis.from_url(services.redis_url, decode_responses=True, socket_timeout=17) as given:
        with LeaseClient(given, prefix=prefix) as client:
            assert client.try_acquire(R) is not None
        assert given.get(f"{prefix}:{{{R}}}:token") == "1"
        assert given.connection_pool.connection_kwargs["socket_timeout"] == 17


async def test_the_given_async_client_and_its_settings_are_left_alone(services: Services, prefix: str) -> None:
    async with redis.asyncio.Redis.from_url(services.redis_url, decode_responses=True) as given:
        async with AsyncLeaseClient(given, prefix=prefix) as client:
            assert await client.try_acquire(R) is not None
        assert await given.get(f"{prefix}:{{{R}}}:token") == "1"


def test_an_owner_that_is_no_text_is_shown_as_far_as_it_is(
    services: Services, redis_client: redis.Redis, key: str
) -> None:
    redis_client.set(key, b"7 \xffe", px=30000)
    with redis.Redis.from_url(services.redis_url, decode_responses=True) as given:
        held = LeaseClient(given, prefix=key.partition(":")[0]).inspect(R)
    assert held is not None
    assert held.owner == "\ufffde"


class Renamed(redis.ConnectionPool):
    """A pool that is not a plain one, as those of Sentinel are none."""


class AsyncRenamed(redis.asyncio.ConnectionPool):
    """The same."""


def test_a_client_with_a_pool_of_its_own_kind_is_used_as_it_is(services: Services, prefix: str) -> None:
    pool = Renamed.from_url(services.redis_url, decode_responses=True)
    with redis.Redis(connection_pool=pool) as given, LeaseClient(given, prefix=prefix, ttl=0.6) as client:
        grant = client.acquire(R, wait=0.0)
        with client.heartbeat(grant) as trust:
            trust.confirm()
        assert client.lift(client.renew(grant), above=7).token == 8
        assert client.release(grant) is True
        assert len(pool._available_connections) == 1
    pool.close()


async def test_an_async_client_with_a_pool_of_its_own_kind_is_used_as_it_is(
    services: Services, prefix: str
) -> None:
    pool = AsyncRenamed.from_url(services.redis_url, decode_responses=True)
    given = redis.asyncio.Redis(connection_pool=pool)
    async with AsyncLeaseClient(given, prefix=prefix, ttl=0.6) as client:
        grant = await client.acquire(R, wait=0.0)
        async with client.heartbeat(grant) as trust:
            trust.confirm()
        assert (await client.lift(await client.renew(grant), above=7)).token == 8
        assert await client.release(grant) is True
    assert len(pool._available_connections) == 1
    await pool.aclose()


def test_a_unix_socket_is_reached(own_redis: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    relay = UnixRelay(path, place(own_redis.url))
    password = redis.connection.parse_url(own_redis.url).get("password")
    try:
        with redis.Redis(unix_socket_path=path, password=password) as given, LeaseClient(given) as client:
            assert client.try_acquire(R) is not None
        gone = LeaseClient(redis.Redis(unix_socket_path=path + "-gone"))
        with pytest.raises(StoreUnreachable, match=re.escape(path + "-gone")):
            gone.try_acquire(R)
    finally:
        relay.close()


class UnixRelay:
    """Passes one Unix socket's bytes to a TCP server."""

    def __init__(self, path: str, to: tuple[str, int]) -> None:
        self._loop, self._to = asyncio.new_event_loop(), to
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        serve = asyncio.start_unix_server(self._serve, path)
        self._server = asyncio.run_coroutine_threadsafe(serve, self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self._to)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
            target.close()
            await target.wait_closed()

        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def test_many_threads_share_few_connections(redis_client: redis.Redis, services: Services, prefix: str) -> None:
    pool = redis.ConnectionPool.from_url(services.redis_url, max_connections=2)
    with redis.Redis(connection_pool=pool) as given, LeaseClient(given, prefix=prefix) as client:
        names = [f"r{n}" for n in range(12)]
        got: list[Any] = []
        threads = [threading.Thread(target=lambda n=n: got.append(client.try_acquire(n))) for n in names]  # type: ignore[misc]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(grant.resource for grant in got) == sorted(names)
        assert len(client._pool._connections) <= 2
    pool.close()


# -- nothing is left

DROPPED = """
import asyncio, gc, sys
import redis, redis.asyncio
from fenceguard.lease import AsyncLeaseClient, LeaseClient, protocol

url, prefix, kind = sys.argv[1:]

def nothing(event): pass

async def hold(client):
    grant = await client.acquire("account:42", wait=5.0)
    async with client.heartbeat(grant, carrier=kind.partition("-")[0]):
        pass
    await client.release(grant)

def make():
    return AsyncLeaseClient(redis.asyncio.Redis.from_url(url), prefix=prefix, listener=nothing)

async def dropped():
    client = make()
    if "cycle" in kind:
        client.itself = client
    await hold(client)
    del client
    gc.collect()
    await asyncio.sleep(0.05)

kept = None

async def outlived():
    global kept
    kept = make()
    await hold(kept)

if kind == "sync":
    client = LeaseClient(redis.Redis.from_url(url), prefix=prefix, listener=nothing)
    client.release(client.acquire("account:42", wait=5.0))
    del client
elif "dropped" in kind:
    asyncio.run(dropped())
else:
    for _ in range(3):
        asyncio.run(outlived())
    for _ in range(2):
        asyncio.run(hold(kept))  # from another loop each time
gc.collect()
"""


@pytest.mark.parametrize(
    "kind",
    ["sync", "task-dropped", "task-dropped-in-a-cycle", "task-outlived", "thread-dropped", "thread-outlived"],
)
def test_a_client_that_is_simply_dropped_leaves_nothing_to_warn_of(
    services: Services, prefix: str, kind: str
) -> None:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", DROPPED, services.redis_url, prefix, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_client_has_no_connection(face: Faces, redis_client: redis.Redis, services: Services) -> None:
    name = f"fenceguard-test-{os.getpid()}-{id(face)}"
    client = face(url=f"{services.redis_url}?client_name={name}")

    def connections() -> int:
        return sum(entry["name"] == name for entry in redis_client.client_list())

    assert client.try_acquire(R) is not None
    assert connections() == 1
    client._call(client.client.close())
    assert connections() == 0
    assert client.try_acquire(R) is None  # it may be used again


def test_a_port_in_the_url_is_what_the_message_names(face: Faces, services: Services, nobody: int) -> None:
    assert f"127.0.0.1:{nobody}" in problem(face(url=at_port(services.redis_url, nobody)))
