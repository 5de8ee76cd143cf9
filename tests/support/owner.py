"""A process that owns private servers: says what it has, then does as it is told. Standard library only.

argv: what to start: ``pair``, ``postgres`` or ``valkey``. Says "began", then a line of JSON about its servers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from fenceguard import embedded


def say(words: object) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def fork(then: Callable[[], object]) -> None:
    """Fork a child, and say its pid."""
    child = os.fork()
    if not child:
        then()
        os._exit(0)
    say(child)


def leave() -> None:
    """In a child: end as a Python program ends, through all its ``with`` blocks."""
    raise SystemExit


def obey(order: str) -> None:
    match order:
        case "raise":
            raise RuntimeError("as told")
        case "exit at once":
            os._exit(0)
        case "fork a child that stays":
            fork(lambda: time.sleep(600))
        case "fork a child that leaves":
            fork(leave)


def main() -> None:
    say("began")
    with ExitStack() as stack:
        if sys.argv[1] == "pair":
            pair = stack.enter_context(embedded.pair())
            servers = [pair.postgres, pair.valkey]
        else:
            servers = [stack.enter_context(getattr(embedded, sys.argv[1])())]
        facts = [
            {"pid": server.pid, "folder": str(server.folder), "url": server.url, "port": server.port}
            for server in servers
        ]
        say(json.dumps(facts))
        for line in sys.stdin:
            obey(line.strip())


if __name__ == "__main__":
    main()
