"""The command `fenceguard`: one module a command, loaded when the command runs, so that ``--help`` is quick."""

from __future__ import annotations

import sys
from importlib import import_module

_EXTRA = {"typer", "rich", "click", "shellingham"}


def main() -> None:
    """Run the command line; exits with 0, with 1 for what went wrong, with 2 for how it was called."""
    try:
        import_module("rich")  # a command would notice too late
        from fenceguard.cli.app import run  # noqa: PLC0415 the extra may be missing
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        sys.stderr.write(f"fenceguard: {error.name} is not installed; run: pip install 'fenceguard[cli]'\n")
        raise SystemExit(2) from None
    run()
