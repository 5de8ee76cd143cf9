"""What the fence adds to a database, and how it gets there.

fenceguard's schema (`install`, `upgrade`, `downgrade`, `status`, `sql`) has an Alembic chain of its own.
`register` gives your chain ``op.add_fence`` and ``op.drop_fence``: call it in your ``env.py``.

Alembic is imported with the first name that needs it: a guard looks at the schema's version without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fenceguard.schema.checks import HEAD, check_server, check_version, fenced_tables

if TYPE_CHECKING:
    from fenceguard.schema.chain import Status, downgrade, install, migrations_dir, sql, status, upgrade
    from fenceguard.schema.operations import AddFence, DropFence, register

__all__ = [
    "HEAD",
    "AddFence",
    "DropFence",
    "Status",
    "check_server",
    "check_version",
    "downgrade",
    "fenced_tables",
    "install",
    "migrations_dir",
    "register",
    "sql",
    "status",
    "upgrade",
]

_OPERATIONS = frozenset({"AddFence", "DropFence", "register"})


def __getattr__(name: str) -> Any:
    """Import a name that needs Alembic (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'fenceguard.schema' has no attribute {name!r}")
    home = "operations" if name in _OPERATIONS else "chain"
    return getattr(import_module(f"fenceguard.schema.{home}"), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})
