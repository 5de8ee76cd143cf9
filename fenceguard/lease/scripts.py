"""The Redis scripts and how they are called: keys, arguments and bytes, no connection.

A resource has two keys, ``<prefix>:{<resource>}:lease`` and ``<prefix>:{<resource>}:token``. The braces put both
into one slot of a Redis Cluster, so ``%``, ``{`` and ``}`` inside a name are percent-encoded.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Final, Literal

from fenceguard.model import Timing
from fenceguard.resources import check_owner, check_resource

_ENCODED: Final = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script: its text, and the SHA-1 by which Redis knows it once it has run."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        """Compute the name."""
        sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", sha)


def _read(name: str) -> Script:
    return Script(files("fenceguard.lease").joinpath("lua", f"{name}.lua").read_text("utf-8"))


ACQUIRE: Final = _read("acquire")
RENEW: Final = _read("renew")
RELEASE: Final = _read("release")
INSPECT: Final = _read("inspect")
LIFT: Final = _read("lift")


@dataclass(frozen=True, slots=True)
class Call:
    """Step: run a script; answered with its reply.

    Attributes:
        script: what to run.
        keys: the keys it touches, all in one slot.
        args: its arguments.
        within: seconds after which the answer is of no use; the connection may allow less.
        command: by name, or with its text after Redis has said that it does not know the name.
    """

    script: Script
    keys: tuple[bytes, ...]
    args: tuple[bytes, ...] = ()
    within: float = math.inf
    command: Literal["EVALSHA", "EVAL"] = "EVALSHA"

    @property
    def words(self) -> tuple[str | bytes | int, ...]:
        """The command as Redis is sent it."""
        text = self.script.sha if self.command == "EVALSHA" else self.script.source
        return self.command, text, len(self.keys), *self.keys, *self.args

    def in_full(self) -> Call:
        """Return the same call with the script's text."""
        return replace(self, command="EVAL")


@dataclass(frozen=True, slots=True)
class Keys:
    """Makes the calls of one client.

    Attributes:
        prefix: begins every key; at least one character, without braces and control characters.

    Raises:
        ValueError: the prefix breaks its rule.
    """

    prefix: str

    def __post_init__(self) -> None:
        """Refuse a prefix that would break the keys."""
        try:
            check_owner(self.prefix)
        except ValueError as error:
            raise ValueError(f"prefix {self.prefix!r} cannot begin a key: {error}") from None
        if set("{}") & set(self.prefix):
            raise ValueError(f"prefix {self.prefix!r} holds a brace; braces in a key mark the resource")

    def acquire(self, resource: str, owner: str, timing: Timing) -> Call:
        """Ask for the lease."""
        return Call(ACQUIRE, self.of(resource), (owner.encode(), b"%d" % timing.ttl_ms))

    def renew(self, resource: str, owner: str, timing: Timing, *, within: float = math.inf) -> Call:
        """Ask for another ttl."""
        return Call(RENEW, self.of(resource)[:1], (owner.encode(), b"%d" % timing.ttl_ms), within)

    def release(self, resource: str, owner: str) -> Call:
        """Give the lease back."""
        return Call(RELEASE, self.of(resource)[:1], (owner.encode(),))

    def inspect(self, resource: str) -> Call:
        """Ask who holds it."""
        return Call(INSPECT, self.of(resource)[:1])

    def lift(self, resource: str, owner: str, timing: Timing, *, above: int) -> Call:
        """Ask for a token above `above`."""
        return Call(LIFT, self.of(resource), (owner.encode(), b"%d" % timing.ttl_ms, b"%d" % above))

    def of(self, resource: str) -> tuple[bytes, bytes]:
        """Return the keys of a resource: its lease and its counter."""
        name = check_resource(resource).translate(_ENCODED)
        stem = f"{self.prefix}:{{{name}}}:".encode()
        return stem + b"lease", stem + b"token"
