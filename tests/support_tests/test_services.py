"""How a test run chooses its servers, that it leaves nothing, and that in CI it skips nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from support import services as choosing
from support.processes import await_gone, descendants
from support.services import Services
from support.waiting import until
from support.workers import ROOT

URLS = {choosing.POSTGRES_VARIABLE: "postgresql://one", choosing.REDIS_VARIABLE: "redis://two"}


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the variables that choose, and unsets the others."""

    def set_to(*, docker: bool = False, **variables: str) -> None:
        for name in (choosing.FORCE_VARIABLE, *URLS):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(choosing, "docker_answers", lambda: docker)

    return set_to


def test_given_urls_come_before_docker_and_docker_before_embedded(setting: Callable[..., None]) -> None:
    chosen = []
    for docker, variables in ((True, URLS), (True, {}), (False, {})):
        setting(docker=docker, **variables)
        chosen.append(choosing.choose())
    assert chosen == ["env", "docker", "embedded"]


def test_one_url_alone_chooses_nothing(setting: Callable[..., None]) -> None:
    setting(**{choosing.POSTGRES_VARIABLE: "postgresql://one"})
    assert choosing.choose() == "embedded"


def test_a_forced_choice_is_taken(setting: Callable[..., None]) -> None:
    setting(docker=True, FENCEGUARD_TEST_SERVICES="embedded", **URLS)
    assert choosing.choose() == "embedded"


@pytest.mark.parametrize("forced", ["env", "podman"])
def test_a_choice_that_cannot_be_taken_is_an_error(setting: Callable[..., None], forced: str) -> None:
    setting(FENCEGUARD_TEST_SERVICES=forced)
    with pytest.raises(ValueError, match=choosing.FORCE_VARIABLE):
        choosing.choose()


def test_a_test_s_database_goes_in_spite_of_sessions_and_prepared_transactions(services: Services) -> None:
    with services.database() as url:
        left_open = psycopg.connect(url, autocommit=True)
        left_open.execute("begin")
        left_open.execute("create table one ()")
        left_open.execute("prepare transaction 'left over'")
        name = left_open.info.dbname
    left_open.close()
    with psycopg.connect(services.postgres_url) as connection:
        found = connection.execute("select from pg_database where datname = %s", (name,)).fetchall()
        prepared = connection.execute("select from pg_prepared_xacts where database = %s", (name,)).fetchall()
    assert (found, prepared) == ([], [])


RUN = """
import threading
from pathlib import Path

import pytest

@pytest.mark.parametrize("n", range(4))
def test_servers(n, redis_client, empty_database_url):
    assert redis_client.ping()

def test_waits(redis_client):
    if Path("waits").exists():
        Path("reached").touch()
        threading.Event().wait()
"""


SKIPS = """
import pytest

def test_passes():
    pass

@pytest.mark.skip(reason="it is too hard")
def test_skips():
    pass
"""


def run_of(folder: Path, *arguments: str, tests: str = RUN, ci: str = "") -> subprocess.Popen[str]:
    """Run a few tests under the project's conftest, their servers in `folder`/tmp."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_it.py").write_text(tests)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    options = ("-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "no:cacheprovider")
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *arguments, folder],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "CI": ci,
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": str(ROOT / "tests"),
            choosing.FORCE_VARIABLE: "embedded",
        },
    )


def test_a_test_run_on_two_workers_shares_one_pair_and_leaves_nothing(open_folder: Path) -> None:
    with run_of(open_folder, "-n", "2") as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert "fenceguard services: embedded" in output
    assert "5 passed" in output
    assert not list((open_folder / "tmp").glob("fenceguard*"))


def test_a_killed_test_run_leaves_no_servers(open_folder: Path) -> None:
    (open_folder / "waits").touch()
    with run_of(open_folder) as run:
        until((open_folder / "reached").exists, "the last test", within=60)
        family = descendants(run.pid)
        folders = [str(path) for path in (open_folder / "tmp").glob("fenceguard*")]
        run.kill()
        await_gone(family, folders)
    assert (len(folders), len(family) >= 6) == (2, True), "the control: there were servers"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_skip_fails_a_run_in_ci_which_names_it(open_folder: Path, workers: str) -> None:
    with run_of(open_folder, "-n", workers, tests=SKIPS, ci="true") as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 1, output
    assert "1 passed, 1 skipped" in output
    assert "this was skipped: test_it.py::test_skips: Skipped: it is too hard" in output


def test_a_skip_is_no_failure_elsewhere(open_folder: Path) -> None:
    with run_of(open_folder, tests=SKIPS) as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert "1 passed, 1 skipped" in output
    assert "this was skipped" not in output
