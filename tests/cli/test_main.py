import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from support.command import environment, fenceguard

import fenceguard as package
from fenceguard.cli import main


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment(),
        timeout=60,
    )


def test_the_installed_script_is_this_command() -> None:
    (script,) = entry_points(group="console_scripts", name="fenceguard")
    assert script.load() is main


def test_help_lists_the_commands_and_loads_no_server_library(tmp_path: Path) -> None:
    ran = python(
        "import sys\n"
        "from fenceguard.cli import main\n"
        "sys.argv = ['fenceguard', '--help']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'sqlalchemy', 'alembic', 'redis', 'psycopg', 'asyncpg', 'fenceguard.embedded'}\n"
        "    print('loaded:', sorted(heavy & set(sys.modules)))\n",
        tmp_path,
    )
    assert ran.returncode == 0
    assert "demo" in ran.stdout
    assert "migrate" in ran.stdout
    assert "loaded: []" in ran.stdout


def test_the_version_is_the_packages(tmp_path: Path) -> None:
    assert fenceguard("--version", cwd=tmp_path).stdout == f"{package.__version__}\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(missing: str, tmp_path: Path) -> None:
    ran = python(f"import sys; sys.modules[{missing!r}] = None; from fenceguard.cli import main; main()", tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"fenceguard: {missing} is not installed; run: pip install 'fenceguard[cli]'\n"


def test_a_module_that_is_missing_for_another_reason_is_not_blamed_on_the_extra(tmp_path: Path) -> None:
    ran = python(
        "import sys; sys.modules['fenceguard.errors'] = None; from fenceguard.cli import main; main()", tmp_path
    )
    assert ran.returncode == 1
    assert "ModuleNotFoundError" in ran.stderr
    assert "pip install" not in ran.stderr


@pytest.mark.parametrize(
    "arguments", [("frobnicate",), ("migrate", "sideways"), ("migrate", "down"), ("demo", "--loud")]
)
def test_a_wrong_call_exits_with_2(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ran = fenceguard(*arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Traceback" not in ran.stderr


def test_a_reader_that_goes_away_ends_the_command_without_a_traceback(tmp_path: Path) -> None:
    ran = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m fenceguard.cli migrate up --sql | head -1"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment(),
        timeout=60,
    )
    assert ran.stdout.count("\n") == 1
    assert "Traceback" not in ran.stderr
