"""Which real servers a test run uses, and the databases it makes on its Postgres."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy import create_engine

from fenceguard import embedded
from support.urls import at_database, driver

POSTGRES_VARIABLE = "FENCEGUARD_TEST_POSTGRES_URL"
REDIS_VARIABLE = "FENCEGUARD_TEST_REDIS_URL"
FORCE_VARIABLE = "FENCEGUARD_TEST_SERVICES"
KINDS = ("env", "docker", "embedded")


@dataclass(frozen=True)
class Services:
    """The two servers of a test run; `run` names it, so that its databases can be told from another's."""

    kind: str
    postgres_url: str
    redis_url: str
    run: str

    def to_worker(self) -> dict[str, Any]:
        return asdict(self)

    def drop_databases(self) -> None:
        """Drop whatever this run has left."""
        with psycopg.connect(self.postgres_url, autocommit=True) as connection:
            names = connection.execute(
                "select datname from pg_database where datname like %s or datname = %s",
                (f"fg\\_test\\_{self.run}\\_%", self.template),
            ).fetchall()
            for (name,) in names:
                drop_database(connection, name)

    @property
    def template(self) -> str:
        return f"fg_template_{self.run}"

    def make_template(self) -> str:
        """Install fenceguard's schema in a database to be copied; the first to ask makes it, the others wait."""
        from fenceguard import schema  # noqa: PLC0415 lease tests need none

        with psycopg.connect(self.postgres_url, autocommit=True) as connection:
            connection.execute("select pg_advisory_lock(hashtext(%s))", (self.template,))
            if (
                connection.execute("select from pg_database where datname = %s", (self.template,)).fetchone()
                is not None
            ):
                return self.template
            raw = self.template + "_raw"
            drop_database(connection, raw)
            create_database(connection, raw)
            engine = create_engine(driver(at_database(self.postgres_url, raw), "psycopg"))
            try:
                with engine.begin() as target:
                    schema.install(target)
            finally:
                engine.dispose()
            # Renamed when complete: a failed install leaves nothing that looks like a template.
            connection.execute(
                sql.SQL("alter database {} rename to {}").format(sql.Identifier(raw), sql.Identifier(self.template))
            )
        return self.template

    @contextlib.contextmanager
    def database(self, template: str = "template1") -> Iterator[str]:
        """Yield the URL of a fresh database, dropped afterwards whoever is still connected."""
        name = f"fg_test_{self.run}_{secrets.token_hex(4)}"
        with psycopg.connect(self.postgres_url, autocommit=True) as connection:
            create_database(connection, name, template)
        try:
            yield at_database(self.postgres_url, name)
        finally:
            with psycopg.connect(self.postgres_url, autocommit=True) as connection:
                drop_database(connection, name)


def create_database(connection: psycopg.Connection[Any], name: str, template: str = "template1") -> None:
    connection.execute(
        sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
    )


def drop_database(connection: psycopg.Connection[Any], name: str) -> None:
    """Drop a database with whoever is in it; a prepared transaction in it must be ended first."""
    gids = connection.execute("select gid from pg_prepared_xacts where database = %s", (name,)).fetchall()
    if gids:
        with psycopg.connect(
            connection.info.dsn, password=connection.info.password, dbname=name, autocommit=True
        ) as inside:
            for (gid,) in gids:
                inside.execute(sql.SQL("rollback prepared {}").format(sql.Literal(gid)))
    connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


def docker_answers() -> bool:
    """Tell whether a Docker engine answers within three seconds."""
    try:
        import docker  # noqa: PLC0415 only where it may be needed
        from docker.errors import DockerException  # noqa: PLC0415
    except ImportError:
        return False
    with warnings.catch_warnings():
        # A client that fails while it is made leaves its socket to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            with contextlib.closing(docker.from_env(timeout=3)) as client:
                return bool(client.ping())
        except (DockerException, OSError):
            return False
        finally:
            gc.collect()


def choose() -> str:
    """Return which servers this run uses: `env`, `docker` or `embedded`."""
    forced = os.environ.get(FORCE_VARIABLE)
    if forced is not None and forced not in KINDS:
        raise ValueError(f"{FORCE_VARIABLE} must be one of {', '.join(KINDS)}, not {forced!r}")
    given = [name for name in (POSTGRES_VARIABLE, REDIS_VARIABLE) if os.environ.get(name)]
    if forced == "env" and len(given) != 2:
        raise ValueError(f"{FORCE_VARIABLE}=env needs {POSTGRES_VARIABLE} and {REDIS_VARIABLE}")
    if forced:
        return forced
    if len(given) == 2:
        return "env"
    return "docker" if docker_answers() else "embedded"


@contextlib.contextmanager
def running(kind: str) -> Iterator[Services]:
    """Run the chosen servers."""
    with _urls(kind) as (postgres_url, redis_url):
        services = Services(kind, postgres_url, redis_url, secrets.token_hex(3))
        try:
            yield services
        finally:
            if kind == "env":
                services.drop_databases()


@contextlib.contextmanager
def _urls(kind: str) -> Iterator[tuple[str, str]]:
    if kind == "env":
        yield os.environ[POSTGRES_VARIABLE], os.environ[REDIS_VARIABLE]
    elif kind == "docker":
        with _containers() as urls:
            yield urls
    else:
        with embedded.pair(postgres_settings={"max_prepared_transactions": "20"}) as pair:
            yield pair.postgres.url, pair.valkey.url


@contextlib.contextmanager
def _containers() -> Iterator[tuple[str, str]]:
    from testcontainers.community.postgres import PostgresContainer  # noqa: PLC0415 a second
    from testcontainers.community.redis import RedisContainer  # noqa: PLC0415

    postgres = PostgresContainer("postgres:18", driver=None).with_command(
        "postgres -c max_prepared_transactions=20"
    )
    with postgres, RedisContainer("valkey/valkey:9") as redis:
        url = f"redis://{redis.get_container_host_ip()}:{redis.get_exposed_port(6379)}/0"
        yield postgres.get_connection_url(), url
