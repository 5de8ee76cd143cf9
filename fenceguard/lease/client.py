"""`LeaseClient`, and the errors of redis-py, which both clients translate here."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, Self, TypeVar

from redis import BlockingConnectionPool, ConnectionPool, Redis, RedisCluster, exceptions

from fenceguard._flow import Flow, Pause, run
from fenceguard.errors import StoreUnreachable
from fenceguard.lease import protocol
from fenceguard.lease.base import ClientBase, Edge
from fenceguard.lease.protocol import Settle, UnknownScript
from fenceguard.lease.scripts import Call
from fenceguard.lease.trust import Trust
from fenceguard.model import Grant, Lease

R = TypeVar("R")


_PROBLEMS: Final[tuple[tuple[tuple[type[Exception], ...], str], ...]] = (
    (
        (
            exceptions.AuthenticationError,
            exceptions.AuthorizationError,
            exceptions.AuthenticationWrongNumberOfArgsError,
            exceptions.NoPermissionError,
        ),
        "{where} refused the login or the right to a command ({error}); check user, password and ACL",
    ),
    ((exceptions.BusyLoadingError,), "{where} is still loading its data ({error})"),
    ((exceptions.ReadOnlyError,), "{where} is a read-only replica ({error}); connect to the primary"),
    ((exceptions.OutOfMemoryError,), "{where} has no memory left ({error}); raise its maxmemory"),
    ((exceptions.MaxConnectionsError,), "all connections to {where} are in use ({error})"),
    ((exceptions.ResponseError, exceptions.RedisClusterException), "{where} answered: {error}"),
    ((exceptions.TimeoutError, TimeoutError), "{where} did not answer in time ({error})"),
    ((exceptions.InvalidResponse,), "{where} does not speak Redis' protocol ({error}); is it another server?"),
)
_NO_CONNECTION: Final = "no connection to {where} that works ({error}); is it running, and a Redis server?"

_logger = logging.getLogger("fenceguard")


def unreachable(edge: Edge, error: Exception) -> StoreUnreachable:
    """Say what an attempt's failure means."""
    problem = next((problem for classes, problem in _PROBLEMS if isinstance(error, classes)), _NO_CONNECTION)
    return edge.unreachable(error, problem)


def heartbeat_failed(trust: Trust, error: BaseException) -> None:
    """Tell the holder that nobody renews its lease any more, for a reason that is no part of the protocol."""
    if isinstance(error, Exception):  # and no cancellation or exit, which others report
        _logger.error("the heartbeat of %r failed", trust.grant.resource, exc_info=error)
    trust.lose("store_unreachable", cause=error)


class LeaseClient(ClientBase["Redis | RedisCluster"]):
    """Leases in Redis, for synchronous code; may be shared by threads, and used after a fork.

    Closed with `close` or as a context manager; a client that is simply dropped closes its connections too.
    """

    _accepts = (Redis, RedisCluster)
    _plain_pools = (ConnectionPool, BlockingConnectionPool)

    def _begin(self) -> None:
        if self._edge.own:
            self._pool = self._pool_within(self._edge.limit)
        self._client: Any = Redis(connection_pool=self._pool) if self._edge.own else self._redis

    def _pool_within(self, timeout: float) -> ConnectionPool:
        settings = self._edge.settings(socket_timeout=timeout, socket_connect_timeout=timeout)
        make: Any = BlockingConnectionPool  # annotated by redis-py as if its time-outs were whole seconds
        pool: ConnectionPool = make(max_connections=self._edge.max_connections, timeout=timeout, **settings)
        return pool

    def try_acquire(self, resource: str) -> Grant | None:
        """Take the lease on `resource` if it is free; `None` when somebody else holds it.

        Raises:
            StoreUnreachable: Redis gave no usable answer, also after a few attempts. What one of them may have
                got has been given back, or ends with its ttl.
            ValueError: `resource` is no valid name.
        """
        return self._run(protocol.try_acquire(self._terms, resource, self._identity.new()))

    def acquire(self, resource: str, *, wait: float) -> Grant:
        """Take the lease on `resource`, waiting at most `wait` seconds for it; 0 tries once.

        Raises:
            LeaseUnavailable: somebody else holds it still.
            StoreUnreachable: as for `try_acquire`.
            ValueError: `resource` is no valid name, or `wait` no number of seconds.
        """
        owner = self._identity.new()
        return self._run(protocol.acquire(self._terms, resource, owner, wait=wait, jitter=random.random))

    def renew(self, grant: Grant) -> Grant:
        """Renew the lease once, and return the grant as renewed; `heartbeat` does this all the time.

        Raises:
            LeaseLost: the lease is gone (``missing``) or somebody else's (``taken_over``), the answer came after
                trust in it had ended (``suspended``), or it is the lease of a parent process (``forked``).
            StoreUnreachable: not known, also after a few attempts; may be asked again.
        """
        return self._run(protocol.renew(self._terms, self._identity.own(grant)))

    def release(self, grant: Grant) -> bool:
        """Give the lease back; return whether it is known to have been ours until now.

        Touches no other acquisition's lease, and none of a parent process. Raises nothing when Redis gives no
        usable answer: the lease then ends with its ttl, and a warning is logged.
        """
        return not self._identity.inherited(grant) and self._run(protocol.release(self._terms, grant))

    def inspect(self, resource: str) -> Lease | None:
        """Return who holds the lease on `resource`, under which token and for how long; `None` when nobody does.

        Raises:
            StoreUnreachable: Redis gave no usable answer.
            ValueError: `resource` is no valid name.
        """
        return self._run(protocol.inspect(self._terms, resource))

    def lift(self, grant: Grant, *, above: int) -> Grant:
        """As owner of the lease, take a token above `above`, where the fence stands; the ttl is refreshed.

        Raises:
            LeaseLost: as for `renew`.
            StoreUnreachable: not known. The grant is ours as before, if it was.
            ValueError: `above` is no token.
        """
        return self._run(protocol.lift(self._terms, self._identity.own(grant), above=above))

    @contextmanager
    def heartbeat(self, grant: Grant, *, max_hold: float | None = None) -> Generator[Trust]:
        """Renew the lease in a thread for the duration of the block, at most `max_hold` seconds.

        The block is not interrupted when the lease is lost: look with `Trust.confirm`, or be told by
        `Trust.on_loss`. After the block there is no further renewal (its end waits for one that is under way, no
        longer than a time-out); release the grant then.

        Raises:
            LeaseLost: the lease may not be trusted any more as the block begins.
            ValueError: `max_hold` is not above 0.
        """
        trust, stop = self._watched(grant, max_hold), threading.Event()
        # A daemon: at the interpreter's exit the lease may expire, but it must not keep the process.
        thread = threading.Thread(
            target=self._carry, args=(trust, stop), name=f"fenceguard-heartbeat {grant.resource}", daemon=True
        )
        thread.start()
        try:
            yield trust
        finally:
            if not trust.forked:  # a child has a copy of the event, perhaps locked, and no thread
                stop.set()
                try:
                    thread.join()
                finally:
                    trust.end()

    def close(self) -> None:
        """Close the client's own connections."""
        if self._edge.own:
            self._pool.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _run(self, flow: Flow[R]) -> R:
        return run(flow, self._perform)

    def _perform(self, step: Any) -> Any:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return False
        if isinstance(step, Settle):
            return self._run(step.flow)
        return self._ask(step)

    def _ask(self, call: Call) -> Any:
        try:
            with self._connected(call.within) as redis:
                return redis.execute_command(*call.words)
        except exceptions.NoScriptError:
            raise UnknownScript from None
        except Exception as error:
            # Not only redis-py's own: its parser, and asyncio on a lost connection, raise what they like.
            raise unreachable(self._edge, error) from error

    @contextmanager
    def _connected(self, within: float) -> Generator[Any]:
        """Yield a client of redis-py whose answer comes `within` so many seconds, or not at all."""
        if not self._edge.own or within >= 2 * self._edge.limit:
            yield self._client
            return
        # Near the end of trust: a connection for this question alone, with time-outs that fit into what remains.
        pool = self._pool_within(max(within / 2, 0.001))
        try:
            yield Redis(connection_pool=pool)
        finally:
            pool.close()

    def _carry(self, trust: Trust, stop: threading.Event) -> None:
        def perform(step: Any) -> Any:
            return (
                stop.wait(min(step.seconds, threading.TIMEOUT_MAX))
                if isinstance(step, Pause)
                else self._perform(step)
            )

        try:
            run(protocol.heartbeat(self._terms, trust), perform)
        except BaseException as error:  # noqa: BLE001 whatever it is, the holder is told
            heartbeat_failed(trust, error)
