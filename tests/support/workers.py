"""Real child processes that a test talks with over pipes, line by line."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


class WorkerEnded(Exception):
    """The process ended, or said nothing in time."""


class Worker:
    """A Python process running a script (a path) or a module (a dotted name) of the tests or the library.

    The process reads lines from stdin and answers by ``print(…, flush=True)``.
    """

    def __init__(self, target: str | Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        run = [str(target)] if str(target).endswith(".py") else ["-m", str(target)]
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            [sys.executable, *run, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._listen, daemon=True),
            threading.Thread(target=self._listen_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def errors(self) -> str:
        """What the process has written to stderr."""
        return "".join(self._errors)

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def say(self, line: str) -> None:
        """Send a line."""
        stdin = _pipe(self._process.stdin)
        stdin.write(line + "\n")
        stdin.flush()

    def hear(self, within: float = 20.0) -> str:
        """Return the next line it prints, without its end.

        Raises:
            WorkerEnded: it ended, or `within` seconds passed; the message holds its stderr.
        """
        try:
            line = self._lines.get(timeout=within)
        except queue.Empty:
            raise WorkerEnded(f"the worker said nothing for {within} s\n{self.errors}") from None
        if line is None:
            self._lines.put(None)
            code = self._process.wait(10)
            self._threads[1].join(10)
            raise WorkerEnded(f"the worker ended with {code}\n{self.errors}")
        return line

    def freeze(self) -> None:
        """Stop the process, and wait until it stands still."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGSTOP)
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                return
            self._process.returncode = os.waitstatus_to_exitcode(status)
        raise WorkerEnded(f"the worker ended before it could be frozen\n{self.errors}")

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it by SIGKILL, frozen or not."""
        self._process.kill()
        self._process.wait(10)

    def wait(self, within: float = 30.0) -> int:
        """Close its stdin, wait for its end and return the exit code."""
        _pipe(self._process.stdin).close()
        return self._process.wait(within)

    def close(self) -> None:
        """Kill it if need be, and leave nothing open."""
        if self._process.poll() is None:
            self.kill()
        for thread in self._threads:
            thread.join(10)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(BrokenPipeError):  # lines that it has not read
                _pipe(pipe).close()

    def _listen(self) -> None:
        for line in _pipe(self._process.stdout):
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _listen_errors(self) -> None:
        self._errors.extend(_pipe(self._process.stderr))


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
