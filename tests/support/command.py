"""The command `fenceguard` as a user starts it: a process of its own, in a folder and environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WITHIN = 120.0


def environment(**variables: str) -> dict[str, str]:
    """Return ours without what would steer the command, and with `variables`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FENCEGUARD_", "PG")) and name not in {"COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM"}
    }
    return kept | variables


def fenceguard(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``fenceguard …`` in `cwd` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "fenceguard.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment(**variables),
        timeout=WITHIN,
    )
