"""The owner's end of a warden, the process that keeps a private server: see ``_warden.py``."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
from pathlib import Path
from signal import Signals
from typing import IO, Any, Final, cast

from fenceguard._binaries import Kind, ServerUser, environment
from fenceguard.errors import EmbeddedUnavailable

ANSWER_WITHIN: Final = 60.0
"""Seconds within which a warden must answer; it does so in milliseconds, and makes a database in half a second."""
END_WITHIN: Final = 10.0
"""Seconds within which it must end; then it is killed, and its heir does the rest."""

_SCRIPT: Final = Path(__file__).with_name("_warden.py")


class WardenLink:
    """The owner's end of one warden; `exit_code` is that of the process it ran last, `None` while it runs."""

    def __init__(self, kind: Kind, user: ServerUser) -> None:
        """Start one."""
        self.exit_code: int | None = None
        self._kind: Kind = kind
        self._owner = os.getpid()
        self._heard = b""
        identity = ("-1", "-1") if user.uid is None else (str(user.uid), str(user.gid))
        name = f"fenceguard-{kind}-{secrets.token_hex(8)}"
        self._process = subprocess.Popen(  # noqa: S603 our own script
            [sys.executable, "-I", "-S", _SCRIPT, str(self._owner), *identity, name, *user.places()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment(),
            start_new_session=True,  # a Ctrl-C is the owner's affair
        )
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._stdin, self._stdout, self._stderr = cast("tuple[IO[bytes], IO[bytes], IO[bytes]]", pipes)

    def folder(self) -> Path:
        """Return the folder, once it is made."""
        return Path(self._answer("folder"))

    def start(self, command: list[str], text: str, *, stop_signal: Signals) -> int:
        """Start a process, `text` its stdin; return its id."""
        self._say({"start": command, "stdin": text, "stop_signal": stop_signal})
        pid: int = self._answer("pid")
        self.exit_code = None
        return pid

    def kill(self) -> None:
        """End the process by SIGKILL and wait for its end."""
        self._say({"signal": Signals.SIGKILL})
        self.wait(ANSWER_WITHIN)

    def wait(self, within: float) -> int | None:
        """Return the process' exit code, `None` when it still runs after `within` seconds."""
        while self.exit_code is None and self._hear(within) is not None:
            pass
        return self.exit_code

    def close(self) -> None:
        """End server, folder and warden; in a forked child, leave them to the parent."""
        ours = os.getpid() == self._owner
        if ours and self._process.returncode is None:
            self._say("stop")
            try:
                self._process.wait(END_WITHIN)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        # For a forked child, which cannot wait for its parent's process: a Popen that is collected without a return
        # code warns that its process still runs.
        self._process.returncode = self._process.returncode or 0
        for pipe in (self._stdin, self._stdout, self._stderr):
            pipe.close()

    def _say(self, words: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # `_hear` says why
            self._stdin.write(json.dumps(words).encode() + b"\n")

    def _answer(self, name: str) -> Any:
        """Return what the warden says under `name`, noting what it says meanwhile."""
        deadline = time.monotonic() + ANSWER_WITHIN
        while (left := deadline - time.monotonic()) > 0:
            words = self._hear(left) or {}
            if "error" in words:
                raise EmbeddedUnavailable(self._kind, words["error"])
            if name in words:
                return words[name]
        raise EmbeddedUnavailable(self._kind, f"its warden gave no answer within {ANSWER_WITHIN:g} s")

    def _hear(self, within: float) -> dict[str, Any] | None:
        """Return the next words, `None` when there are none `within` so many seconds."""
        poll = select.poll()  # not select(), which refuses descriptors above 1023
        poll.register(self._stdout, select.POLLIN)
        while b"\n" not in self._heard:
            if not poll.poll(within * 1000):
                return None
            words = self._stdout.read(65536)
            if not words:
                raise EmbeddedUnavailable(self._kind, f"its warden has ended: {self._last_words()}")
            self._heard += words
        line, _, self._heard = self._heard.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        self.exit_code = answer.get("exit", self.exit_code)
        return answer

    def _last_words(self) -> str:
        lines = self._stderr.read().decode(errors="replace").splitlines()
        return lines[-1] if lines else f"exit code {self._process.wait()}"
