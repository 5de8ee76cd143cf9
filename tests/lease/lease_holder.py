"""A process that holds leases, told what to do line by line: ``lease_holder.py URL PREFIX TTL OWNER-LABEL``."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from typing import Any

from redis import Redis

from fenceguard.errors import FenceguardError, LeaseLost
from fenceguard.events import Event
from fenceguard.lease import LeaseClient, Trust
from fenceguard.model import Grant


class Holder:
    def __init__(self, url: str, prefix: str, ttl: str, label: str) -> None:
        self.client = LeaseClient(
            Redis.from_url(url), ttl=float(ttl), prefix=prefix, owner=label, listener=self.nothing
        )
        self.hold = ExitStack()
        self.grant: Grant
        self.trust: Trust

    def nothing(self, event: Event) -> None:
        pass

    def acquire(self, resource: str, wait: str) -> dict[str, Any]:
        self.grant = self.client.acquire(resource, wait=float(wait))
        return {"owner": self.grant.owner, "token": self.grant.token}

    def hold_on(self) -> None:
        self.trust = self.hold.enter_context(self.client.heartbeat(self.grant))

    def confirm(self) -> None:
        self.trust.confirm()

    def renew(self) -> None:
        self.client.renew(self.grant)

    def release(self) -> bool:
        self.hold.close()
        return self.client.release(self.grant)

    def fork(self) -> dict[str, Any]:
        """Fork inside the hold; the child leaves the hold's blocks and ends, as a program does."""
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            seen = {
                "remaining": self.trust.remaining(),
                "lost": self.trust.lost and self.trust.lost.reason,
                "confirm": outcome(self.confirm)["error"],
                "renew": outcome(self.renew)["error"],
                "lift": outcome(lambda: self.client.lift(self.grant, above=5))["error"],
                "heartbeat": outcome(lambda: self.hold.enter_context(self.client.heartbeat(self.grant)))["error"],
                "released": self.release(),
            }
            other = self.client.try_acquire("a child's own")
            seen["own"] = other is not None and self.client.release(other)
            os.write(writes, json.dumps(seen).encode())
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        said: dict[str, Any] = json.loads(os.read(reads, 65536))
        return said | {"exit": os.waitstatus_to_exitcode(status)}

    def leave(self) -> None:
        """End the program inside the hold, with the heartbeat running."""
        say(json.dumps({"result": None, "error": None}))
        sys.exit(0)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def outcome(act: Any, *args: str) -> dict[str, Any]:
    try:
        return {"result": act(*args), "error": None}
    except KeyboardInterrupt:
        return {"result": None, "error": "interrupted"}
    except LeaseLost as lost:
        return {"result": None, "error": lost.reason}
    except FenceguardError as error:
        return {"result": None, "error": type(error).__name__}


def main() -> None:
    holder = Holder(*sys.argv[1:])
    say("ready")
    for line in sys.stdin:
        name, *args = line.split("\t")
        say(json.dumps(outcome(getattr(holder, name.strip()), *(arg.strip() for arg in args))))


if __name__ == "__main__":
    main()
