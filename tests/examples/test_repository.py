from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "repository.py"


def test_the_repository_example_withdraws_and_is_refused_when_stale() -> None:
    run = subprocess.run([sys.executable, "-W", "error", EXAMPLE], capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    assert (lines[0], lines[-1]) == ("balance: 70", "balance: 70")
    assert lines[1].startswith("refused: write to public.account for 'account:42' under token 2 was refused")
    # The event, on the logger `fenceguard`, which this example leaves to Python's last resort.
    assert run.stderr.splitlines() == ["Refused resource='account:42' token=2 newest=3 table='public.account'"]
