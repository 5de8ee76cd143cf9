"""Private servers start quickly, are who they say they are, and are closed to everybody else."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from pathlib import Path

import psycopg
import pytest
import redis
from support.processes import command_line, crowding, descendants
from support.urls import with_password, without_password
from support.waiting import until
from support.workers import Worker

from fenceguard import embedded
from fenceguard.errors import EmbeddedUnavailable


def test_a_pair_is_ready_within_a_second_and_a_half() -> None:
    def start() -> float:
        crowd, began = crowding(), time.monotonic()
        with (
            embedded.pair() as pair,
            psycopg.connect(pair.postgres.url) as postgres,
            redis.Redis.from_url(pair.valkey.url) as valkey,
        ):
            assert postgres.execute("select 1").fetchone() == (1,)
            assert valkey.ping()
            return (time.monotonic() - began) / crowd

    assert min(start() for _ in range(3)) < 1.5


def test_twenty_pairs_started_at_once_are_each_its_owner_s(worker: Callable[..., Worker]) -> None:
    owners = [worker("support.owner", "pair") for _ in range(20)]
    assert [owner.hear(60) for owner in owners] == ["began"] * 20
    pairs = [json.loads(owner.hear(120)) for owner in owners]

    for postgres, valkey in pairs:
        with psycopg.connect(postgres["url"]) as connection:
            row = connection.execute("select current_setting('data_directory')").fetchone()
        with redis.Redis.from_url(valkey["url"]) as client:
            pid = client.info("server")["process_id"]
        assert (row, pid) == ((f"{postgres['folder']}/work/data",), valkey["pid"])
    assert len({server["port"] for pair in pairs for server in pair}) == 40

    assert [owner.wait(60) for owner in owners] == [0] * 20
    assert not [server for pair in pairs for server in pair if Path(server["folder"]).exists()]


def test_servers_listen_on_loopback_s_first_address_alone() -> None:
    with embedded.pair() as pair:
        for server in (pair.postgres, pair.valkey):
            socket.create_connection(("127.0.0.1", server.port), 5).close()
            with pytest.raises(ConnectionRefusedError):
                # An address of this machine as well, on which a server of all interfaces would answer.
                socket.create_connection(("127.0.0.2", server.port), 5)


@pytest.mark.parametrize("stranger", [lambda url: with_password(url, "guess"), without_password])
def test_a_stranger_without_the_password_is_refused(stranger: Callable[[str], str]) -> None:
    with embedded.pair() as pair:
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(stranger(pair.postgres.url), user="postgres")
        with redis.Redis.from_url(stranger(pair.valkey.url)) as client, pytest.raises(redis.AuthenticationError):
            client.get("anything")


def test_no_command_line_shows_a_password() -> None:
    with embedded.pair() as pair:
        lines = [command_line(pid) for pid in (os.getpid(), *descendants(os.getpid()))]
        secrets = pair.postgres.password, pair.valkey.password
    assert any("postgres -D" in line for line in lines), "the control: the server's command line was seen"
    assert not [line for line in lines if any(secret in line for secret in secrets)]


def test_settings_reach_the_servers() -> None:
    with (
        embedded.pair(
            postgres_settings={"max_prepared_transactions": "7"}, valkey_settings={"maxmemory": "12345678"}
        ) as pair,
        psycopg.connect(pair.postgres.url) as postgres,
        redis.Redis.from_url(pair.valkey.url) as valkey,
    ):
        setting = postgres.execute("select current_setting('max_prepared_transactions')").fetchone()
        memory = valkey.config_get("maxmemory")
    assert (setting, memory) == (("7",), {"maxmemory": "12345678"})


def test_the_caller_s_postgres_variables_and_locale_change_nothing(worker: Callable[..., Worker]) -> None:
    strange = {
        "PGDATA": "/nowhere",
        "PGPORT": "1",
        "PGOPTIONS": "-c search_path=x",
        "LC_ALL": "de_DE.UTF-8",
        "TZ": "Asia/Tokyo",
    }
    owner = worker("support.owner", "postgres", env=strange)
    owner.hear()
    (server,) = json.loads(owner.hear())
    with psycopg.connect(server["url"]) as connection:
        row = connection.execute(
            "select current_setting('TimeZone'), current_setting('search_path'), current_setting('lc_messages')"
        ).fetchone()
    assert row == ("UTC", '"$user", public', "C")


# -- ports


def test_a_port_lost_to_somebody_quicker_is_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        _lose_port_first(monkeypatch, taken, times=2)
        with embedded.pair() as pair:
            with psycopg.connect(pair.postgres.url) as postgres, redis.Redis.from_url(pair.valkey.url) as valkey:
                answers = postgres.execute("select 1").fetchone(), valkey.ping()
            ports = pair.postgres.port, pair.valkey.port
            logs = pair.postgres.log(), pair.valkey.log()
    assert answers == ((1,), True)
    assert taken not in ports
    assert all("Address already in use" in log for log in logs), "the control: the port was tried, and lost"


@pytest.mark.parametrize("start", [embedded.postgres, embedded.valkey])
def test_ports_lost_again_and_again_are_an_error_that_says_so(
    start: Callable[[], AbstractContextManager[embedded.Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        _lose_port_first(monkeypatch, stranger.getsockname()[1], times=1000)
        with pytest.raises(EmbeddedUnavailable) as caught, start():
            pass
    assert "Address already in use" in str(caught.value)


def _lose_port_first(monkeypatch: pytest.MonkeyPatch, taken: int, *, times: int) -> None:
    """Have each server choose a port that is taken, so many times."""
    choose = embedded.Server._reserve
    losses: dict[embedded.Server, int] = {}

    def lose(server: embedded.Server) -> None:
        choose(server)
        losses[server] = losses.get(server, 0) + 1
        if losses[server] <= times:
            server.port = taken

    monkeypatch.setattr(embedded.Server, "_reserve", lose)


# -- faults on purpose


def test_a_killed_valkey_comes_back_empty_on_its_port() -> None:
    with embedded.valkey() as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        before = server.pid, server.url
        server.kill()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), 5)
        server.restart()
        value, after = client.get("key"), (server.pid, server.url)
    assert value is None
    assert (before[0] != after[0], before[1]) == (True, after[1])


def test_a_killed_postgres_comes_back_with_what_was_committed() -> None:
    with embedded.postgres() as server, psycopg.connect(server.url) as connection:
        connection.execute("create table kept as select 42 as answer")
        connection.commit()
        server.kill()
        server.restart()
        with psycopg.connect(server.url) as again:
            row = again.execute("select answer from kept").fetchone()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    assert row == (42,)


def test_a_killed_postgres_waits_for_its_last_backend_before_it_comes_back() -> None:
    with embedded.postgres() as server, closing(psycopg.connect(server.url)) as connection:
        backend = connection.info.backend_pid
        os.kill(backend, signal.SIGSTOP)
        server.kill()

        def let_go() -> None:
            until(lambda: "pre-existing shared memory block" in server.log(), "a refused start")
            os.kill(backend, signal.SIGCONT)

        with ThreadPoolExecutor() as pool:
            going = pool.submit(let_go)
            server.restart()
            going.result()
        with psycopg.connect(server.url) as again:
            row = again.execute("select 1").fetchone()
    assert row == (1,)


def test_restart_ends_a_server_that_still_runs() -> None:
    with embedded.valkey() as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        server.restart()
        value = client.get("key")
    assert value is None


def test_a_killed_server_s_port_is_taken_by_nobody_else() -> None:
    with embedded.valkey() as server, socket.socket() as other:
        server.kill()
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", server.port))


def test_where_no_port_can_be_kept_a_server_finds_one_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_KEEPS_PORTS", False)
    with embedded.valkey() as server, redis.Redis.from_url(server.url) as client, socket.socket() as other:
        assert client.ping()
        client.close()
        server.kill()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past what is left of the client's connection
        other.bind(("127.0.0.1", server.port))
        other.listen()
        with pytest.raises(EmbeddedUnavailable) as caught:
            server.restart()
    assert "Address already in use" in str(caught.value)
