import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.catalog import objects
from support.command import fenceguard
from support.services import Services
from support.sql import Connect
from support.urls import at_database, at_port, driver, place, without_password

from fenceguard.schema import HEAD

DRIVERS = ["", "psycopg", "asyncpg"]


def with_driver(url: str, name: str) -> str:
    return driver(url, name) if name else url


@pytest.mark.parametrize("name", DRIVERS)
def test_up_status_and_down_go_round_trip(name: str, empty_database_url: str, tmp_path: Path) -> None:
    url = with_driver(empty_database_url, name)
    before = objects(empty_database_url)

    def migrate(*arguments: str) -> dict[str, Any]:
        ran = fenceguard("migrate", *arguments, "--json", cwd=tmp_path, FENCEGUARD_POSTGRES_URL=url)
        assert (ran.returncode, ran.stderr) == (0, "")
        found: dict[str, Any] = json.loads(ran.stdout)
        return found

    missing, up, current, again = migrate("status"), migrate("up"), migrate("status"), migrate("up")
    down, gone = migrate("down", "base"), migrate("status")
    assert (missing["state"], missing["current"], missing["pending"]) == ("missing", None, [HEAD])
    assert (up["before"], up["after"]) == (None, HEAD)
    assert (current["state"], current["current"], current["pending"]) == ("current", HEAD, [])
    assert (again["before"], again["after"]) == (HEAD, HEAD)
    assert (down["before"], down["after"]) == (HEAD, None)
    assert gone == missing
    assert objects(empty_database_url) == before


def test_each_step_tells_in_a_line_what_it_did(empty_database_url: str, tmp_path: Path) -> None:
    steps = [("up",), ("up",), ("down", "base")]
    told = [fenceguard("migrate", *step, "--postgres", empty_database_url, cwd=tmp_path).stdout for step in steps]
    assert [text.partition(": ")[2] for text in told] == [
        f"fenceguard's schema went from nothing to {HEAD}\n",
        f"fenceguard's schema is at {HEAD} already\n",
        f"fenceguard's schema went from {HEAD} to nothing\n",
    ]


def test_the_printed_sql_installs_through_psql_what_up_installs(
    services: Services,
    empty_database_url: str,
    psql: Callable[[str, str], subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    printed = fenceguard("migrate", "up", "--sql", cwd=tmp_path)
    assert (printed.returncode, printed.stderr) == (0, "")
    psql(empty_database_url, printed.stdout)
    status = fenceguard("migrate", "status", "--json", "--postgres", empty_database_url, cwd=tmp_path)
    with services.database() as installed:
        fenceguard("migrate", "up", "--postgres", installed, cwd=tmp_path)
        expected = objects(installed)
    assert json.loads(status.stdout)["state"] == "current"
    assert objects(empty_database_url) == expected


def test_the_printed_sql_as_json_is_the_same_text(tmp_path: Path) -> None:
    plain, as_json = (fenceguard("migrate", "up", "--sql", *more, cwd=tmp_path).stdout for more in ([], ["--json"]))
    assert json.loads(as_json)["sql"].rstrip() == plain.rstrip()


def test_sql_for_a_part_of_the_chain_is_refused(tmp_path: Path) -> None:
    ran = fenceguard("migrate", "up", HEAD, "--sql", cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "leave REV out" in ran.stderr


def test_without_a_url_the_error_names_the_three_ways(tmp_path: Path) -> None:
    ran = fenceguard("migrate", "up", cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert all(way in ran.stderr for way in ("--postgres", "FENCEGUARD_POSTGRES_URL", "[tool.fenceguard]"))


def test_the_url_is_taken_from_pyproject(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.fenceguard]\npostgres = {json.dumps(database_url)}\n")
    ran = fenceguard("migrate", "status", "--json", cwd=tmp_path)
    assert json.loads(ran.stdout)["state"] == "current"


def test_an_unknown_revision_is_a_wrong_call_and_changes_nothing(empty_database_url: str, tmp_path: Path) -> None:
    before = objects(empty_database_url)
    ran = fenceguard("migrate", "up", "9876", "--postgres", empty_database_url, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert "9876" in ran.stderr
    assert objects(empty_database_url) == before


def test_a_schema_that_is_newer_than_the_library_is_named(database_url: str, pg: Connect, tmp_path: Path) -> None:
    pg().execute("update fenceguard.version set version_num = '9876'")
    status = fenceguard("migrate", "status", "--json", "--postgres", database_url, cwd=tmp_path)
    up = fenceguard("migrate", "up", "--postgres", database_url, cwd=tmp_path)
    assert json.loads(status.stdout)["state"] == "ahead"
    assert (up.returncode, up.stdout, up.stderr.count("\n")) == (1, "", 1)
    assert "9876" in up.stderr


def test_down_refuses_while_a_table_is_fenced_and_says_which(
    database_url: str, pg: Connect, tmp_path: Path
) -> None:
    pg().execute("create table account (id bigint primary key)")
    pg().execute("select fenceguard.add_fence('account', 'account:{id}', 'reject')")
    before = objects(database_url)
    ran = fenceguard("migrate", "down", "base", "--postgres", database_url, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert "public.account" in ran.stderr
    assert objects(database_url) == before


@pytest.mark.parametrize("name", DRIVERS)
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_refused_login_is_one_line_that_does_not_hold_it(
    name: str, as_json: list[str], services: Services, tmp_path: Path
) -> None:
    host, port = place(services.postgres_url)
    url = with_driver(f"postgresql://no_such_role:s3cr3t%2Fpass@{host}:{port}/postgres", name)
    ran = fenceguard("migrate", "up", *as_json, "--postgres", url, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert "no_such_role" in ran.stderr
    assert "s3cr3t" not in ran.stderr


@pytest.mark.parametrize("name", DRIVERS)
def test_no_server_is_one_line_that_names_the_place(
    name: str, services: Services, closed_port: int, tmp_path: Path
) -> None:
    url = with_driver(at_port(services.postgres_url, closed_port), name)
    ran = fenceguard("migrate", "status", "--postgres", url, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert f"127.0.0.1:{closed_port}" in ran.stderr
    assert "--postgres" in ran.stderr


def test_a_server_that_is_no_postgres_is_one_line(services: Services, tmp_path: Path) -> None:
    host, port = place(services.redis_url)
    url = f"postgresql://app:s3cr3t@{host}:{port}/db?connect_timeout=2"
    ran = fenceguard("migrate", "status", "--postgres", url, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert f"{host}:{port}" in ran.stderr
    assert "s3cr3t" not in ran.stderr


def test_a_database_that_is_not_there_is_one_line(services: Services, tmp_path: Path) -> None:
    url = at_database(services.postgres_url, "no_such_database")
    ran = fenceguard("migrate", "up", "--postgres", url, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert "no_such_database" in ran.stderr


@pytest.mark.parametrize("name", ["nodriver", "pg8000"])
def test_a_driver_that_is_not_there_is_a_wrong_call(name: str, services: Services, tmp_path: Path) -> None:
    url = driver(without_password(services.postgres_url), name)
    ran = fenceguard("migrate", "up", "--postgres", url, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert f"postgresql+{name}" in ran.stderr


def test_without_psycopg_a_plain_url_takes_asyncpg(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "sys.modules['psycopg'] = None\n"
        "atexit.register(lambda: sys.stderr.write(str('asyncpg.connection' in sys.modules)))\n"
    )
    ran = fenceguard(
        "migrate", "status", "--json", "--postgres", database_url, cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert (ran.returncode, ran.stderr) == (0, "True")
    assert json.loads(ran.stdout)["state"] == "current"
