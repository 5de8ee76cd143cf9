"""Servers from Debian's packages, started by hand on loopback: the oldest versions that are supported."""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import redis

from support.waiting import until

POSTGRES_BIN = Path("/usr/lib/postgresql/15/bin")
REDIS_SERVER = Path("/usr/bin/redis-server")


@contextmanager
def _kept_port() -> Iterator[int]:
    """Yield a port that the kernel gives to nobody who asks for a free one; a server may listen on it."""
    with socket.socket() as keeper:
        keeper.bind(("127.0.0.1", 0))
        # Only now: with it set before, the kernel could choose a port that another keeper has.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield keeper.getsockname()[1]


@contextmanager
def _folder() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a folder and the arguments that make a process run as its owner: `nobody` when we are root."""
    with tempfile.TemporaryDirectory(prefix="fenceguard-debian-") as name:
        if os.geteuid() != 0:
            yield Path(name), {}
        else:
            nobody = pwd.getpwnam("nobody")
            os.chown(name, nobody.pw_uid, nobody.pw_gid)
            yield Path(name), {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


@contextmanager
def _running(command: list[str | Path], answers: Callable[[], bool], **options: Any) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)

    def ready() -> bool:
        assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
        return answers()

    try:
        until(ready, f"an answer of {command[0]}")
        yield
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def postgres_15() -> Iterator[str]:
    """Run Postgres 15; yields its URL."""
    with _folder() as (folder, owner), _kept_port() as port:
        data = folder / "data"
        password = secrets.token_hex()
        (folder / "password").write_text(password)
        options = ("--username=postgres", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync")
        initdb = [POSTGRES_BIN / "initdb", "-D", data, f"--pwfile={folder / 'password'}", *options]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd=folder, **owner)
        url = f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres"
        settings = f"-p {port} -h 127.0.0.1 -F -c max_prepared_transactions=20 -k".split()
        command = [POSTGRES_BIN / "postgres", "-D", data, *settings, ""]

        def answers() -> bool:
            with suppress(psycopg.OperationalError), psycopg.connect(url):
                return True
            return False

        with _running(command, answers, cwd=folder, **owner):
            yield url


@contextmanager
def redis_7() -> Iterator[str]:
    """Run Redis 7.0; yields its URL."""
    with _folder() as (folder, owner), _kept_port() as port:
        url = f"redis://127.0.0.1:{port}/0"
        command = [REDIS_SERVER, *f"--bind 127.0.0.1 --port {port} --save".split(), "", "--dir", folder]

        def answers() -> bool:
            with suppress(redis.ConnectionError), redis.Redis.from_url(url) as client:
                return bool(client.ping())
            return False

        with _running(command, answers, cwd=folder, **owner):
            yield url
