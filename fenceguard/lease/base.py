"""What both clients are made of: terms, identity, and the settings of the redis-py client that they are given."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Generic, TypeVar

from fenceguard import events
from fenceguard.errors import LeaseLost, StoreUnreachable
from fenceguard.lease.identity import Identity
from fenceguard.lease.protocol import Terms
from fenceguard.lease.scripts import Keys
from fenceguard.lease.trust import Clock, Trust
from fenceguard.lease.trust import clock as boot_clock
from fenceguard.model import Grant, Timing

C = TypeVar("C")

MAX_CONNECTIONS: Final = 100

# What belongs to the given pool itself, or would retry or delay answers behind the protocol's back.
_NOT_TAKEN_OVER: Final = frozenset(
    {
        "himport_registry",
        "maint_notifications_config",
        "maint_notifications_pool_handler",
        "oss_cluster_maint_notifications_handler",
        "orig_host_address",
        "orig_socket_timeout",
        "orig_socket_connect_timeout",
        "retry",
        "retry_on_error",
        "retry_on_timeout",
        "health_check_interval",
    }
)


class Edge:
    """How to reach the server of a given redis-py client, and what to call its failures.

    Attributes:
        limit: seconds that connecting may take, and as many again the answer: no longer than the given client
            allows, and short enough for a renewal that hangs to be tried again before trust ends.
        where: the server, for messages.
        own: whether the client's pool is one of `plain_pools`, whose settings own connections can take over.
    """

    def __init__(self, redis: Any, timing: Timing, plain_pools: tuple[type, ...]) -> None:
        """Look at `redis`."""
        pool: Any = getattr(redis, "connection_pool", None)
        self.own = type(pool) in plain_pools
        self._pool = pool
        self._given: dict[str, Any] = dict(pool.connection_kwargs) if self.own else {}
        timeouts = [self._given.get(f"socket_{name}timeout", 5.0) for name in ("", "connect_")]
        self.limit: float = min(timing.renew_every, timing.stall_budget / 3, *filter(None, timeouts))
        self.where = self._place() if self.own else f"the server of {type(redis).__name__}"

    @property
    def max_connections(self) -> int:
        """How many connections to use at most."""
        return min(MAX_CONNECTIONS, self._pool.max_connections) if self.own else MAX_CONNECTIONS

    def settings(self, *, socket_timeout: float | None, socket_connect_timeout: float) -> dict[str, Any]:
        """Return the arguments of a pool with the given client's settings and these time-outs (seconds)."""
        return {name: value for name, value in self._given.items() if name not in _NOT_TAKEN_OVER} | {
            "connection_class": self._pool.connection_class,
            "socket_timeout": socket_timeout,
            "socket_connect_timeout": socket_connect_timeout,
            "decode_responses": False,
            "protocol": 2,
        }

    def unreachable(self, error: Exception, problem: str) -> StoreUnreachable:
        """Make the error for an attempt's failure; `problem` has places for ``where`` and ``error``."""
        text = problem.format(where=self.where, error=str(error) or type(error).__name__)
        password = self._given.get("password")
        return StoreUnreachable("redis", text.replace(str(password), "***") if password else text)

    def _place(self) -> str:
        path = self._given.get("path")
        return path or f"{self._given.get('host', 'localhost')}:{self._given.get('port', 6379)}"


class ClientBase(Generic[C]):
    """What the two clients share: terms, identity, and the given redis-py client.

    Attributes:
        timing: ttl, renew_every and safety in seconds.
        clock: monotonic seconds by which trust is measured.
    """

    _accepts: ClassVar[tuple[type, ...]]
    _plain_pools: ClassVar[tuple[type, ...]]

    def __init__(  # noqa: PLR0913 a client's settings
        self,
        redis: C,
        *,
        ttl: float = 30.0,
        renew_every: float | None = None,
        safety: float | None = None,
        prefix: str = "fenceguard",
        owner: str | None = None,
        clock: Clock = boot_clock,
        listener: events.Listener = events.log,
    ) -> None:
        """Keep leases on the server of `redis`, over connections of its own.

        They have the settings of the given client's pool, but shorter time-outs and no retries, which the
        protocol makes itself. Clients of a Cluster or of Sentinel are used as they are.

        Args:
            redis: a redis-py client; it stays open and may be used and closed independently.
            ttl: life of a lease after each renewal, at least 0.1.
            renew_every: time between renewals, at most and by default ttl/3.
            safety: how long before a lease can end its holder stops trusting it; by default ttl/10.
            prefix: begins every key; no braces.
            owner: a label in the owners' names, by default ``<host>:<pid>``; what makes each unique is added.
            clock: monotonic seconds; by default a clock that goes on while the machine sleeps.
            listener: is handed events; by default they are logged.

        Raises:
            ValueError: a rule of timing, prefix or label is broken; the message states it.
            TypeError: `redis` is no client of the kind that is needed.
        """
        if not isinstance(redis, self._accepts):
            names = " or ".join(f"{cls.__module__.partition('.client')[0]}.{cls.__name__}" for cls in self._accepts)
            raise TypeError(f"{type(self).__name__} needs a client of type {names}, not {type(redis).__name__}")
        self.timing = Timing.of(ttl, renew_every=renew_every, safety=safety)
        self.clock = clock
        self._redis = redis
        self._edge = Edge(redis, self.timing, self._plain_pools)
        self._identity = Identity(owner)
        self._terms = Terms(Keys(prefix), self.timing, clock, listener)
        self._begin()

    def _begin(self) -> None:
        """Make what the client needs beside."""

    def _watched(self, grant: Grant, max_hold: float | None) -> Trust:
        """Return the trust of a heartbeat that begins; its end is reported to the listener first."""
        trust = Trust(self._identity.own(grant), timing=self.timing, clock=self.clock, max_hold=max_hold)
        trust.confirm()

        def report(lost: LeaseLost) -> None:
            events.tell(self._terms.listener, events.Lost(lost.resource, trust.grant.token, lost.reason))

        trust.on_loss(report)
        return trust
