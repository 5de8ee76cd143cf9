"""What commands print: results on stdout, as text or as one JSON value, and errors on stderr, one line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def say(text: str) -> None:
    """Print one line of a result."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def say_json(value: Mapping[str, Any]) -> None:
    """Print a result as JSON, in ASCII so that every terminal and pipe takes it."""
    say(json.dumps(value, indent=2))


def complain(error: object) -> None:
    """Print an error as one line on stderr."""
    sys.stderr.write(f"fenceguard: {one_line(error)}\n")


def one_line(text: object) -> str:
    """Return a text of several lines as one."""
    return "; ".join(part.strip() for part in str(text).splitlines() if part.strip())
