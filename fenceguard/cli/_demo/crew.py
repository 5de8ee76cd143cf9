"""The demo's worker processes, as their parent sees them; every wait for one is bounded."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator
from threading import Thread
from typing import Any, Final, cast

from fenceguard.cli._demo.story import DemoError

PROGRAM: Final = "fenceguard.cli._demo.worker"
NOISE_LINES: Final = 3


class Worker:
    """One real process that speaks JSON, a line a message, over its stdin and stdout."""

    def __init__(self, name: str) -> None:
        """Start the process; URLs are told to it later, so that no list of processes shows a password."""
        self.name = name
        self._noise: deque[str] = deque(maxlen=NOISE_LINES)
        self._heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="backslashreplace",
            # A Ctrl-C is for the parent, which then ends its workers. In the parent's session still, so that the
            # kernel ends a frozen worker as a stopped member of an orphaned group when the parent is killed.
            process_group=0,
        )
        self._reader = Thread(target=self._read, name=f"demo-worker-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def say(self, message: dict[str, Any]) -> None:
        """Send a message; raises `DemoError` when the worker has gone."""
        try:
            self._stdin.write(json.dumps(message) + "\n")
            self._stdin.flush()
        except OSError:
            raise self._gone() from None

    def hear(self, *, within: float) -> dict[str, Any]:
        """Return the worker's next message; raises `DemoError` after `within` seconds, or when it has gone."""
        try:
            message = self._heard.get(timeout=within)
        except queue.Empty:
            raise DemoError(f"worker {self.name} said nothing within {within:g} s") from None
        if message is None:
            self._heard.put(None)
            raise self._gone()
        return message

    def freeze(self, *, within: float) -> None:
        """Stop the process where it stands, and return when it has stopped; raises `DemoError`."""
        self._process.send_signal(signal.SIGSTOP)
        status: queue.SimpleQueue[int] = queue.SimpleQueue()
        Thread(target=lambda: status.put(os.waitpid(self.pid, os.WUNTRACED)[1]), daemon=True).start()
        try:
            stopped = os.WIFSTOPPED(status.get(timeout=within))
        except queue.Empty:
            raise DemoError(f"worker {self.name} could not be frozen within {within:g} s") from None
        if not stopped:
            raise self._gone()

    def thaw(self) -> None:
        """Let the process run on."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End the process, frozen or not, and return when it and its pipes are gone."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(OSError):  # what was not sent to a process that has gone
            self._stdin.close()

    def _read(self) -> None:
        with self._stdout as lines:
            for line in lines:
                try:
                    message: Any = json.loads(line)
                except ValueError:
                    message = None
                if isinstance(message, dict):
                    self._heard.put(cast("dict[str, Any]", message))
                else:
                    self._noise.append(line.strip())
        self._heard.put(None)

    def _gone(self) -> DemoError:
        noise = " / ".join(self._noise) or "it said nothing"
        return DemoError(f"worker {self.name} has ended before its time: {noise}")

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    @property
    def _stdout(self) -> Any:
        return self._process.stdout


@contextlib.contextmanager
def crew(runs: int) -> Generator[list[tuple[Worker, Worker]]]:
    """Start a worker A and a worker B for each of so many runs, for the duration of the block."""
    with contextlib.ExitStack() as started:

        def start(name: str) -> Worker:
            worker = Worker(name)
            started.callback(worker.end)
            return worker

        yield [(start("A"), start("B")) for _ in range(runs)]
