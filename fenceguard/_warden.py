"""Keeps one folder, and the server run in it, for an owner; removes both when the owner ends, however it ends.

A script for ``python -I -S``, started by `fenceguard.embedded`; not to be imported.

::

    argv     the owner's process id; user and group id for the server (-1: as they are); the folder's name; then
             the places for it, in order of preference
    stdout   one JSON object a line: {"folder": path} first; {"pid": n} or {"error": text} after each start;
             {"exit": code} when that process has ended
    stdin    one JSON value a line: {"start": command, "stdin": text, "stop_signal": n} or {"signal": n};
             "stop", the end of stdin, SIGTERM and the owner's death end the server and remove the folder

There are two processes: should the warden be killed, its heir, which waits for nothing else, does the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
IPC_RMID = 0
PATIENCE = 0.5
"""Seconds that a server gets to end by itself."""
LOOK_EVERY = 0.1
"""Seconds between two looks at the owner where the kernel does not report its death."""
LIBC = ctypes.CDLL(None)


def can_enter(place: str, user: int, group: int) -> bool:
    """Tell whether the server's user can reach what lies in `place`; asked of the kernel, as that user."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)
            os._exit(0 if os.access(place, os.X_OK) else 1)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def make_folder(name: str, places: list[str], user: int, group: int) -> Path:
    """Make the folder; the server's user may write in its `work` alone, so that nobody leads root astray."""
    place = next((place for place in places if user < 0 or can_enter(place, user, group)), None)
    if place is None:
        raise PermissionError(f"user {user} can enter none of {places}; set TMPDIR to a folder that it can")
    folder = Path(place, name)
    work = folder / "work"
    folder.mkdir(mode=0o700)
    work.mkdir(mode=0o700)
    if user >= 0:
        os.chown(work, user, group)
        folder.chmod(0o711)
    return folder


def remove(folder: Path) -> None:
    """Remove the folder; what is left of a killed server may write for a moment yet."""
    forget_memory(folder / "work" / "data" / "postmaster.pid")
    deadline = time.monotonic() + 5
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.01)


def forget_memory(postmaster_pid: Path) -> None:
    """Remove the System V segment of a Postgres that was killed: 56 bytes that would outlive it in the kernel."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _, segment = postmaster_pid.read_text().splitlines()[6].split()
        LIBC.shmctl(int(segment), IPC_RMID, None)


def end(group: int, number: int) -> None:
    """Send a signal to a server's process group, if there still is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of zombies
        os.killpg(group, number)


def inherit(will: int, folder: Path) -> None:
    """Wait for the warden's end; unless it has seen to everything, end its last server and remove the folder."""
    with os.fdopen(will) as lines:
        words = [line.strip() for line in lines]
    if words and words[-1] == "done":
        return
    if server := int(words[-1]) if words else 0:
        # On Linux the kernel has told the server already (see `Warden.follow`).
        deadline = time.monotonic() + PATIENCE
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(server, 0)
                time.sleep(0.01)
        end(server, signal.SIGKILL)
    remove(folder)


class Warden:
    """One folder, and at most one server at a time."""

    def __init__(self, owner: int, user: int, group: int, folder: Path, will: int) -> None:
        """Watch over `folder`; `will` is the pipe to the heir."""
        self.owner, self.user, self.group, self.folder, self.will = owner, user, group, folder, will
        self.server: subprocess.Popen[bytes] | None = None
        self.pid = os.getpid()
        self.stop_signal = int(signal.SIGKILL)
        self.heard = b""
        self.over = False
        self.log = os.open(folder / "server.log", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)

    def say(self, **words: object) -> None:
        """Tell the owner, if it still listens."""
        with contextlib.suppress(BrokenPipeError):
            os.write(1, json.dumps(words).encode() + b"\n")

    def bequeath(self, word: object) -> None:
        """Tell the heir."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.will, f"{word}\n".encode())

    def start(self, command: list[str], text: str, stop_signal: int) -> None:
        """Start a process of the server's user; `text` is its stdin, so that no secret meets a disk."""
        self.stop_signal = stop_signal
        source, sink = os.pipe()
        os.write(sink, text.encode())
        os.close(sink)
        ours = self.user < 0
        if not ours:
            os.fchown(source, self.user, self.group)  # who opens /dev/stdin opens it anew, as that user
        try:
            self.server = subprocess.Popen(  # noqa: S603 what the owner says
                command,
                stdin=source,
                stdout=self.log,
                stderr=self.log,
                cwd=self.folder / "work",
                start_new_session=True,
                preexec_fn=self.follow,  # noqa: PLW1509 the warden has one thread
                user=None if ours else self.user,
                group=None if ours else self.group,
                extra_groups=None if ours else [],
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.say(error=f"{command[0]}: {error}")
        else:
            self.bequeath(self.server.pid)
            self.say(pid=self.server.pid)
        finally:
            os.close(source)

    def follow(self) -> None:
        """In the child: have the kernel end it when the warden is killed; the change of user would undo that."""
        if sys.platform == "linux":
            LIBC.prctl(PR_SET_PDEATHSIG, self.stop_signal)
        if os.getppid() != self.pid:  # killed before that
            os._exit(1)

    def obey(self, line: bytes) -> None:
        """Do what the owner says."""
        words = json.loads(line)
        if words == "stop":
            self.over = True
        elif "start" in words:
            self.start(words["start"], words["stdin"], words["stop_signal"])
        elif self.server is not None:
            self.server.send_signal(words["signal"])

    def listen(self) -> None:
        """Read what the owner says; the end of it is the end."""
        words = os.read(0, 65536)
        self.over = self.over or not words
        *lines, self.heard = (self.heard + words).split(b"\n")
        for line in lines:
            self.obey(line)

    def look(self) -> None:
        """Tell the owner, and the heir, when the server has ended."""
        if self.server is not None and self.server.poll() is not None:
            code, self.server = self.server.returncode, None
            self.bequeath(0)
            self.say(exit=code)

    def serve(self, bell: int) -> None:
        """Serve until the owner wants no more or is no more; `bell` rings at signals."""
        watched: list[int] = [0, bell]
        patience: float | None = LOOK_EVERY
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # a sandbox may refuse
                watched.append(os.pidfd_open(self.owner))
                patience = None
        # Not the pipe alone: processes forked from the owner hold its other end as well.
        while not self.over and os.getppid() == self.owner:
            ready, _, _ = select.select(watched, [], [], patience)
            if bell in ready:
                os.read(bell, 4096)
            self.look()
            if 0 in ready:
                self.listen()

    def finish(self) -> None:
        """End the server and remove the folder."""
        if self.server is not None:
            group = self.server.pid
            end(group, self.stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.server.wait(PATIENCE)
            end(group, signal.SIGKILL)
            self.server.wait()
        remove(self.folder)
        self.bequeath("done")


def main() -> None:
    """Live as the module says."""
    owner, user, group = map(int, sys.argv[1:4])
    folder = make_folder(sys.argv[4], sys.argv[5:], user, group)
    will, testament = os.pipe()
    if not (heir := os.fork()):
        os.setsid()  # out of reach of what ends the warden's group
        for descriptor in (0, 1, 2, testament):
            os.close(descriptor)
        inherit(will, folder)
        os._exit(0)
    os.close(will)
    warden = Warden(owner, user, group, folder, testament)

    def stop(_number: int, _frame: object) -> None:
        warden.over = True

    def wake(_number: int, _frame: object) -> None:
        """Let the bell ring."""

    # Handlers, not SIG_IGN, which a server would inherit.
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, wake)
    signal.signal(signal.SIGTERM, stop)
    bell, ringer = os.pipe()
    os.set_blocking(ringer, False)
    signal.set_wakeup_fd(ringer)
    warden.say(folder=str(folder))
    try:
        warden.serve(bell)
    finally:
        warden.finish()
        os.close(testament)
        os.waitpid(heir, 0)


if __name__ == "__main__":
    main()
