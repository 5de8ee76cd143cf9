"""What both guards share: their settings, their binding, and what they do without waiting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from fenceguard._flow import Flow
from fenceguard.errors import StaleToken
from fenceguard.events import Claimed, ExpiredLate, Listener, Outlived, log, tell
from fenceguard.fence.session import attach
from fenceguard.guard.context import ContextGrants, active_holds
from fenceguard.guard.hold import Held, Hold
from fenceguard.guard.protocol import claim, reclaim
from fenceguard.lease import Trust
from fenceguard.model import Grant, Timing, check_seconds
from fenceguard.schema import check_server, check_version

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

RedisT = TypeVar("RedisT")
EngineT = TypeVar("EngineT", bound="Engine | AsyncEngine")
ClientT = TypeVar("ClientT")
ClaimsT = TypeVar("ClaimsT")

Carrier: TypeAlias = Literal["task", "thread"]


def check_database(connection: Connection) -> None:
    """Refuse a database that cannot serve this version of the library.

    Raises:
        SchemaMissing: fenceguard's schema is missing, older or newer, or this role may not use it.
        StoreUnreachable: the server is older than supported.
    """
    check_server(connection)
    check_version(connection)


@dataclass(frozen=True, slots=True)
class Bound(Generic[ClientT, ClaimsT, EngineT]):
    """A guard's connections: its lease client, its pool for claims, and the engine that it guards."""

    client: ClientT
    claims: ClaimsT
    engine: EngineT


class GuardBase(ABC, Generic[RedisT, EngineT, ClientT, ClaimsT]):
    """Settings and binding of a guard."""

    _carriers: ClassVar[tuple[Carrier, ...]]
    _client_class: ClassVar[type[Any]]
    _claims_class: ClassVar[type[Any]]
    _event_class: ClassVar[Any]
    _lock_class: ClassVar[Any]

    def __init__(  # noqa: PLR0913 a guard's settings
        self,
        redis: RedisT | None = None,
        engine: EngineT | None = None,
        *,
        ttl: float = 30.0,
        renew_every: float | None = None,
        safety: float | None = None,
        prefix: str = "fenceguard",
        carrier: Carrier | None = None,
        max_hold: float | None = None,
        claim_wait: float | None = None,
        owner: str | None = None,
        listener: Listener = log,
    ) -> None:
        """Set up a guard; all durations are seconds.

        Args:
            redis: client of the server that keeps the leases; or see `bind`.
            engine: of the database whose writes are guarded; or see `bind`.
            ttl: life of a lease after each renewal, at least 0.1.
            renew_every: time between renewals, at most and by default ttl/3.
            safety: how long before a lease can end its holder stops trusting it; by default ttl/10.
            prefix: of the keys in Redis.
            carrier: what runs the heartbeat: ``"thread"``, which a busy interpreter lock delays, or (for
                `AsyncGuard`, and its default) ``"task"``, which a blocked event loop delays.
            max_hold: after so long a lease is no longer renewed and its holder loses it; at least `ttl`.
            claim_wait: the least time that a claim waits for open transactions of earlier holders, by default
                ttl/3.
            owner: label that owners begin with, by default host and process; a unique part is added.
            listener: is handed every event; by default they are logged.

        Raises:
            ValueError: a setting breaks its rule, or only one of `redis` and `engine` is given.
        """
        self._timing = Timing.of(ttl, renew_every=renew_every, safety=safety)
        self._claim_wait = check_seconds("claim_wait", ttl / 3 if claim_wait is None else claim_wait)
        self._max_hold = None if max_hold is None else check_seconds("max_hold", max_hold, least=ttl)
        self._prefix = prefix
        self._owner = owner
        self._listener = listener
        self._carrier: Carrier = carrier or self._carriers[0]
        if self._carrier not in self._carriers:
            raise ValueError(f"{type(self).__name__} has carrier {' or '.join(self._carriers)}, not {carrier!r}")
        # What has to be undone when a hold has ended, and what waits for the end of its transactions.
        self._kept: dict[Hold, Any] = {}
        self._keepers: dict[Hold, Any] = {}
        self._source = ContextGrants(self, recover=self._recover, listener=listener)
        self._binding: Bound[ClientT, ClaimsT, EngineT] | None = None
        if redis is not None and engine is not None:
            self.bind(redis, engine)
        elif redis is not None or engine is not None:
            raise ValueError(
                f"{type(self).__name__} takes redis and engine together, or a later bind(redis, engine)"
            )

    def bind(self, redis: RedisT, engine: EngineT) -> None:
        """Connect the guard to its servers; opens no connection yet.

        Every transaction on `engine` announces the grants of the context from now on.

        Raises:
            ValueError: the guard is bound already.
            TypeError: `redis` or `engine` is of the other kind (sync for `AsyncGuard`, async for `Guard`).
        """
        if self._binding is not None:
            raise ValueError("this guard is bound already; make another one for other servers")
        claims = self._claims_class(engine, check=check_database)
        client = self._client_class(
            redis,
            ttl=self._timing.ttl,
            renew_every=self._timing.renew_every,
            safety=self._timing.safety,
            prefix=self._prefix,
            owner=self._owner,
            listener=self._listener,
        )
        attach(engine, self._source)
        self._binding = Bound(client, claims, engine)

    def current(self) -> Held:
        """Return the innermost open hold of this guard around the caller.

        Raises:
            LookupError: there is none.
        """
        for hold in reversed(active_holds(self)):
            if not hold.ended:
                return hold.held
        raise LookupError("no hold of this guard is open here; call this inside hold() or a fenced function")

    @property
    def _bound(self) -> Bound[ClientT, ClaimsT, EngineT]:
        if self._binding is None:
            raise ValueError("this guard is not bound; call guard.bind(redis, engine) at start-up")
        return self._binding

    def _claiming(self, trust: Trust, *, began: float, wait: float) -> Flow[Grant]:
        """Claim within what is left of a hold's `wait`, or within ``claim_wait``, whichever is more."""
        give_up_at = max(began + wait, monotonic() + self._claim_wait)
        return claim(trust.grant, give_up_at=give_up_at, clock=monotonic)

    def _reclaiming(self, hold: Hold, refusal: StaleToken) -> Flow[Grant]:
        give_up_at = monotonic() + self._claim_wait
        return reclaim(hold.grant, above=refusal.newest, give_up_at=give_up_at, clock=monotonic)

    def _claimed(self, trust: Trust, grant: Grant, *, began: float) -> Hold:
        """Begin a hold under a claimed grant; raises `LeaseLost` when trust has ended meanwhile."""
        trust.lifted(grant)
        trust.confirm()
        tell(self._listener, Claimed(grant.resource, grant.token, waited=monotonic() - began))
        return Hold(self, trust, over=self._event_class(), recovery=self._lock_class())

    def _note_late(self, hold: Hold) -> None:
        """Note that trust ended before the work did, which did not need it any more."""
        late = -hold.trust.remaining()
        if late > 0:
            tell(self._listener, ExpiredLate(hold.resource, hold.grant.token, late=late))

    def _note_outlived(self, hold: Hold) -> None:
        tell(self._listener, Outlived(hold.resource, hold.grant.token, bound=self._timing.ttl))

    @abstractmethod
    def _recover(self, hold: Hold, refusal: StaleToken) -> None:
        """Claim the fence anew; see `ContextGrants`."""
