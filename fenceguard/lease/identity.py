"""Owners: who is who among acquisitions, also within one process and after a fork."""

from __future__ import annotations

import os
import secrets
import socket

from fenceguard.errors import LeaseLost
from fenceguard.model import Grant
from fenceguard.resources import check_owner


class Identity:
    """Names the owner of each acquisition, ``<label>-<nonce>``, and knows the owners that a fork left behind.

    A nonce begins with the mark of the process that made it, so that a forked child tells its parent's grants
    from its own. A grant that was sent to another process on purpose is not concerned.
    """

    def __init__(self, label: str | None) -> None:
        """Name owners after `label`, by default ``<host>:<pid>``; ValueError where that makes no valid owner."""
        self._label = label
        self._parents: tuple[str, ...] = ()
        self._begin()
        self.new()

    def new(self) -> str:
        """Return an owner that nobody had before."""
        self._look()
        label = f"{socket.gethostname()}:{self._pid}" if self._label is None else self._label
        return check_owner(f"{label}-{self._mark}{secrets.token_hex(8)}")

    def inherited(self, grant: Grant) -> bool:
        """Tell whether `grant` is the lease of a process that this one was forked from."""
        self._look()
        return grant.owner.rpartition("-")[2].startswith(self._parents)

    def own(self, grant: Grant) -> Grant:
        """Return `grant`.

        Raises:
            LeaseLost: it is the lease of a process that this one was forked from.
        """
        if self.inherited(grant):
            raise LeaseLost(grant.resource, "forked")
        return grant

    def _look(self) -> None:
        if self._pid != os.getpid():
            self._parents = (*self._parents, self._mark)
            self._begin()

    def _begin(self) -> None:
        self._pid, self._mark = os.getpid(), secrets.token_hex(4)
