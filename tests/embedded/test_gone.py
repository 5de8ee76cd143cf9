"""Private servers and their folders go when their owner does, however it does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from support.processes import alive, await_gone, command_line, crowding, descendants
from support.waiting import until
from support.workers import Worker

from fenceguard import _warden_link, embedded
from fenceguard.errors import EmbeddedUnavailable

Owner = Callable[..., tuple[Worker, list[dict[str, Any]]]]


@pytest.fixture
def owner(worker: Callable[..., Worker]) -> Owner:
    """A process that owns private servers, and what it says of them."""

    def start(what: str = "pair") -> tuple[Worker, list[dict[str, Any]]]:
        process = worker("support.owner", what)
        assert process.hear() == "began"
        return process, json.loads(process.hear())

    return start


def folders(servers: list[dict[str, Any]]) -> list[str]:
    return [server["folder"] for server in servers]


def wardens(process: Worker) -> list[int]:
    """Return its wardens, without their heirs."""
    family = descendants(process.pid)
    return [pid for pid in family if "_warden.py" in command_line(pid) and parent_of(pid) == process.pid]


ENDS: dict[str, Callable[[Worker], object]] = {
    "returns": lambda process: process.returncode,
    "raises": lambda process: process.say("raise"),
    "exits without a word": lambda process: process.say("exit at once"),
    "gets SIGTERM": lambda process: os.kill(process.pid, signal.SIGTERM),
    "gets SIGINT": lambda process: os.kill(process.pid, signal.SIGINT),
    "gets SIGKILL": lambda process: os.kill(process.pid, signal.SIGKILL),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_owner_ends_and_its_servers_are_gone_within_a_second(owner: Owner, end: str) -> None:
    def end_one() -> float:
        process, servers = owner()
        family = descendants(process.pid)
        assert len(family) >= 6, "the control: wardens, heirs and servers were running"
        assert all(Path(folder).exists() for folder in folders(servers))
        ENDS[end](process)
        process.wait()
        return await_gone(family, folders(servers)) / crowding()

    assert min(end_one() for _ in range(2)) < 1.0


def test_the_segment_of_a_killed_owner_s_postgres_goes_too(owner: Owner) -> None:
    process, servers = owner("postgres")
    segment = segment_of(servers[0]["folder"])
    assert segment in segments(), "the control: Postgres has one while it runs"
    family = descendants(process.pid)
    process.kill()
    await_gone(family, [])
    assert segment not in segments()


def test_the_segment_of_a_killed_postgres_goes_with_its_folder() -> None:
    with embedded.postgres() as server:
        segment = segment_of(str(server.folder))
        server.kill()
        assert segment in segments(), "the control: the kernel keeps a killed server's segment"
    assert segment not in segments()


def test_a_killed_warden_s_servers_go_with_their_folders(owner: Owner) -> None:
    process, servers = owner()
    family = descendants(process.pid)
    for warden in wardens(process):
        os.kill(warden, signal.SIGKILL)
    await_gone(family, folders(servers))
    assert process.returncode is None, "the owner goes on"
    assert process.wait() == 0, "and leaves its with block in peace"


def test_owner_and_wardens_killed_together_leave_nothing(owner: Owner) -> None:
    process, servers = owner()
    family = descendants(process.pid)
    direct = wardens(process)
    for pid in (*direct, process.pid):
        os.kill(pid, signal.SIGKILL)
    await_gone(family, folders(servers))


def test_a_warden_s_whole_process_group_killed_leaves_nothing(owner: Owner) -> None:
    process, servers = owner()
    family = descendants(process.pid)
    for warden in wardens(process):
        os.killpg(warden, signal.SIGKILL)
    await_gone(family, folders(servers))


def test_a_warden_asked_to_end_ends_its_server(owner: Owner) -> None:
    process, servers = owner("valkey")
    family = descendants(process.pid)
    os.kill(wardens(process)[0], signal.SIGTERM)
    await_gone(family, folders(servers))


def test_a_frozen_server_is_ended_all_the_same(owner: Owner) -> None:
    process, servers = owner()
    family = descendants(process.pid)
    for server in servers:
        os.kill(server["pid"], signal.SIGSTOP)
    process.kill()
    await_gone(family, folders(servers))


def test_an_owner_killed_while_its_forked_child_lives_takes_its_servers_along(owner: Owner) -> None:
    process, servers = owner()
    family = descendants(process.pid)
    process.say("fork a child that stays")
    child = int(process.hear())
    try:
        process.kill()
        await_gone(family, folders(servers))
        assert alive(child), "the control: the child, which holds the owner's pipes, lives"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_ends_leaves_its_parent_s_servers_alone(owner: Owner) -> None:
    process, servers = owner()
    process.say("fork a child that leaves")
    child = int(process.hear())
    until(lambda: not alive(child), "the end of the child")
    with redis.Redis.from_url(servers[1]["url"]) as client:
        assert client.ping()
    assert all(alive(server["pid"]) and Path(server["folder"]).exists() for server in servers)
    assert process.wait() == 0
    assert not process.errors


@pytest.mark.parametrize("moment", ["work", "work/data", "work/data/base/1"])
def test_an_owner_killed_while_postgres_makes_its_database_leaves_nothing(
    worker: Callable[..., Worker], open_folder: Path, moment: str
) -> None:
    process = worker("support.owner", "postgres", env={"TMPDIR": str(open_folder)})
    until(lambda: list(open_folder.glob(f"fenceguard-*/{moment}")), moment)
    family = descendants(process.pid)
    process.kill()
    await_gone(family, [])
    until(lambda: not list(open_folder.iterdir()), "the end of the folder")


def test_a_ctrl_c_reaches_the_owner_and_not_its_servers(worker: Callable[..., Worker], tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import os, socket, sys\n"
        "from fenceguard import embedded\n"
        "os.setpgrp()\n"
        "with embedded.valkey() as server:\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        sys.stdin.readline()\n"
        "    except KeyboardInterrupt:\n"
        "        socket.create_connection(('127.0.0.1', server.port), 5).close()\n"
        "        print('still there', flush=True)\n"
    )
    process = worker(script)
    process.hear()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the whole group
    assert process.hear() == "still there"
    assert process.wait() == 0


def test_stopping_twice_is_stopping_once() -> None:
    with embedded.valkey() as server:
        server.stop()
        gone = not server.folder.exists()
        server.stop()
    assert gone


# -- wardens that fail


def test_a_warden_that_hangs_is_killed_and_its_heir_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_warden_link, "END_WITHIN", 0.2)
    with embedded.valkey() as server:
        warden = parent_of(server.pid)
        os.kill(warden, signal.SIGSTOP)
    await_gone([server.pid, warden], [str(server.folder)])


def test_a_warden_that_does_not_answer_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with embedded.valkey() as server:
        server.kill()
        warden = next(pid for pid in descendants(os.getpid()) if server.folder.name in command_line(pid))
        monkeypatch.setattr(_warden_link, "ANSWER_WITHIN", 0.2)
        os.kill(warden, signal.SIGSTOP)
        try:
            with pytest.raises(EmbeddedUnavailable) as caught:
                server.restart()
        finally:
            os.kill(warden, signal.SIGCONT)
    assert "its warden gave no answer within 0.2 s" in str(caught.value)


def test_a_warden_that_was_killed_is_an_error_that_says_so() -> None:
    with embedded.valkey() as server:
        os.kill(parent_of(server.pid), signal.SIGKILL)
        with pytest.raises(EmbeddedUnavailable) as caught:
            server.restart()
    assert "its warden has ended: exit code -9" in str(caught.value)


# -- looking


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def segment_of(folder: str) -> str:
    """Return the id of a Postgres' System V segment, from the seventh line of its postmaster.pid."""
    return Path(folder, "work", "data", "postmaster.pid").read_text().splitlines()[6].split()[1]


def segments() -> list[str]:
    return [line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
