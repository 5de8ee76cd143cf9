"""Looking at processes and waiting for their end, by way of /proc."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from support.waiting import PATIENCE, until


def crowding() -> float:
    """Return how many times longer work takes now than on an idle machine, since others want the processor too."""
    work = 0.05
    began, worked = time.monotonic(), time.thread_time()
    while time.thread_time() - worked < work:
        pass
    return max(1.0, (time.monotonic() - began) / work)


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that waits for its parent to take notice of its end does not."""
    return _status(pid)[:1] not in ([], ["Z"], ["X"])


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, children of children too."""
    parents = {
        int(entry.name): _status(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()
    }
    found = [pid]
    for one in found:
        found += [child for child, status in parents.items() if status and int(status[1]) == one]
    return found[1:]


def command_line(pid: int) -> str:
    """Return a process' command line, empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except FileNotFoundError:
        return ""


def await_gone(pids: Iterable[int], folders: Iterable[str], *, within: float = PATIENCE) -> float:
    """Wait until processes and folders are gone; return the seconds that took."""

    def left() -> list[object]:
        return [pid for pid in pids if alive(pid)] + [folder for folder in folders if Path(folder).exists()]

    return until(lambda: not left(), f"the end of {left()}", within=within)


def _status(pid: int) -> list[str]:
    """Return a process' state, parent and so on; empty when it is gone."""
    try:
        # The command, in brackets, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
