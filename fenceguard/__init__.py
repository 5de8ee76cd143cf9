"""A fenced storage guard for Postgres writes.

A Redis lease says who may act now; Postgres refuses whoever acted too late. Names are imported on first
use, so that users of the lease alone load no SQLAlchemy and users of the fence alone load no redis.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fenceguard import fence as fence
    from fenceguard import schema as schema
    from fenceguard.errors import ClaimTimeout as ClaimTimeout
    from fenceguard.errors import EmbeddedUnavailable as EmbeddedUnavailable
    from fenceguard.errors import FenceguardError as FenceguardError
    from fenceguard.errors import LeaseLost as LeaseLost
    from fenceguard.errors import LeaseUnavailable as LeaseUnavailable
    from fenceguard.errors import NotClaimed as NotClaimed
    from fenceguard.errors import OpenTransaction as OpenTransaction
    from fenceguard.errors import OutcomeUnknown as OutcomeUnknown
    from fenceguard.errors import SchemaMissing as SchemaMissing
    from fenceguard.errors import StaleToken as StaleToken
    from fenceguard.errors import StoreUnreachable as StoreUnreachable
    from fenceguard.errors import TablesStillFenced as TablesStillFenced
    from fenceguard.errors import TooManyResources as TooManyResources
    from fenceguard.errors import TransactionTooOld as TransactionTooOld
    from fenceguard.errors import UnfencedWrite as UnfencedWrite
    from fenceguard.errors import WrongResource as WrongResource
    from fenceguard.fence.tables import Fenced as Fenced
    from fenceguard.fence.tables import FencedDataclass as FencedDataclass
    from fenceguard.guard import AsyncGuard as AsyncGuard
    from fenceguard.guard import Guard as Guard
    from fenceguard.guard import Held as Held
    from fenceguard.lease import AsyncLeaseClient as AsyncLeaseClient
    from fenceguard.lease import LeaseClient as LeaseClient
    from fenceguard.model import Claim as Claim
    from fenceguard.model import Grant as Grant
    from fenceguard.model import Lease as Lease
    from fenceguard.resources import ANY_RESOURCE as ANY_RESOURCE

__version__ = "0.1.0"

_HOMES = {
    "fenceguard.errors": (
        "ClaimTimeout",
        "EmbeddedUnavailable",
        "FenceguardError",
        "LeaseLost",
        "LeaseUnavailable",
        "NotClaimed",
        "OpenTransaction",
        "OutcomeUnknown",
        "SchemaMissing",
        "StaleToken",
        "StoreUnreachable",
        "TablesStillFenced",
        "TooManyResources",
        "TransactionTooOld",
        "UnfencedWrite",
        "WrongResource",
    ),
    "fenceguard.fence.tables": ("Fenced", "FencedDataclass"),
    "fenceguard.guard": ("AsyncGuard", "Guard", "Held"),
    "fenceguard.lease": ("AsyncLeaseClient", "LeaseClient"),
    "fenceguard.model": ("Claim", "Grant", "Lease"),
    "fenceguard.resources": ("ANY_RESOURCE",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ANY_RESOURCE",
    "AsyncGuard",
    "AsyncLeaseClient",
    "Claim",
    "ClaimTimeout",
    "EmbeddedUnavailable",
    "Fenced",
    "FencedDataclass",
    "FenceguardError",
    "Grant",
    "Guard",
    "Held",
    "Lease",
    "LeaseClient",
    "LeaseLost",
    "LeaseUnavailable",
    "NotClaimed",
    "OpenTransaction",
    "OutcomeUnknown",
    "SchemaMissing",
    "StaleToken",
    "StoreUnreachable",
    "TablesStillFenced",
    "TooManyResources",
    "TransactionTooOld",
    "UnfencedWrite",
    "WrongResource",
    "__version__",
    "fence",
    "schema",
]


def __getattr__(name: str) -> Any:
    """Import a public name, or the rooms `fence` and `schema`, on first use (PEP 562)."""
    if name in {"fence", "schema"}:
        return import_module(f"fenceguard.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fenceguard' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
