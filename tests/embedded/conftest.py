"""A Python for users of all kinds."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.users import Installation


@pytest.fixture(scope="session")
def installation() -> Iterator[Installation]:
    """A Python that every user can run, in a folder whose name holds a blank."""
    folder = Path(tempfile.mkdtemp(prefix="fg test "))
    folder.chmod(0o755)
    yield Installation.make(folder / "home")
    shutil.rmtree(folder)
