"""What the demo puts into the two servers, and takes out again."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any, Final

from sqlalchemy import Connection, CursorResult, Engine

from fenceguard import schema
from fenceguard.cli._demo.story import ACCOUNT_ID, AMOUNTS, RUNS, START, Job, Run
from fenceguard.cli._output import complain
from fenceguard.cli._settings import Url
from fenceguard.cli._signals import undisturbed
from fenceguard.cli._stores import engine_for, ping, reaching, redis_for
from fenceguard.errors import FenceguardError
from fenceguard.lease.scripts import Keys

_TABLES: Final[dict[Run, str]] = {"fence": "account", "lease": "account_without_fence"}
_MARK: Final = "installed by fenceguard demo, which removes it again"
"""By this comment on it the last demo on a database knows that it may remove fenceguard's schema again."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A schema, a resource and key prefixes of the demo's own; in the schema a table with an account for each run.

    Attributes:
        engine: on the database.
        postgres: its URL.
        redis: URL of the server that keeps the leases.
        nonce: makes the names unique.
    """

    engine: Engine
    postgres: Url
    redis: Url
    nonce: str

    @property
    def schema(self) -> str:
        """Name of the schema."""
        return f"fenceguard_demo_{self.nonce}"

    @property
    def resource(self) -> str:
        """The resource, but for the account's id; the same in both runs, whose leases differ by prefix."""
        return f"account-{self.nonce}"

    def job(self, run: Run, name: str) -> Job:
        """Return what the worker `name` of `run` is told."""
        resource = f"{self.resource}:{ACCOUNT_ID}"
        return Job(
            name=name,
            run=run,
            postgres=self.postgres.text,
            redis=self.redis.text,
            prefix=f"{self.schema}_{run}",
            resource=resource,
            trial_resource=f"{resource}-{name}",
            table=f"{self.schema}.{_TABLES[run]}",
        )

    def balance(self, run: Run) -> int:
        """Return what the account of `run` holds."""
        with reaching(self.postgres), self.engine.connect() as connection:
            balance: int = self._run(connection, "balance", table=_TABLES[run]).scalar_one()
            return balance

    def put_up(self) -> None:
        """Make all that the runs need, in one transaction.

        Raises:
            StoreUnreachable: a server gave no usable answer, or the role lacks a right.
            SchemaMissing: fenceguard's schema is there in a version that does not fit.
        """
        with redis_for(self.redis) as client:
            ping(self.redis, client)
        with reaching(self.postgres), self.engine.begin() as connection:
            self._run(connection, "take_turn")
            if schema.status(connection).current is None:
                schema.install(connection)
                self._run(connection, "mark")
            schema.check_version(connection)
            self._run(connection, "put_up", start=START)

    def take_down(self) -> None:
        """Remove all of it; also fenceguard's schema, if a demo has installed it and nobody else uses it."""
        try:
            with reaching(self.postgres), self.engine.begin() as connection:
                self._run(connection, "take_turn")
                self._run(connection, "take_down")
                if self._run(connection, "is_ours_alone").scalar_one():
                    schema.downgrade(connection, "base")
        finally:
            with reaching(self.redis), redis_for(self.redis) as client:
                jobs = [self.job(run, name) for run in RUNS for name in AMOUNTS]
                client.delete(*(key for job in jobs for key in _keys(job)))

    def _run(self, connection: Connection, name: str, **values: object) -> CursorResult[Any]:
        """Run one of the files of SQL, with these words, all our own, in place of its ``$names``."""
        source = files("fenceguard.cli._demo").joinpath("sql", f"{name}.sql").read_text("utf-8")
        words = {"schema": self.schema, "resource": self.resource, "account_id": ACCOUNT_ID, "mark": _MARK}
        return connection.exec_driver_sql(Template(source).substitute(words, **values))


def _keys(job: Job) -> tuple[bytes, ...]:
    """Return the keys that a worker may have made."""
    keys = Keys(job.prefix)
    return (*keys.of(job.resource), *keys.of(job.trial_resource))


@contextmanager
def stage(postgres: Url, redis: Url) -> Generator[Stage]:
    """Put up a stage for the duration of the block; take it down however the block ends."""
    engine = engine_for(postgres)
    built = Stage(engine, postgres, redis, secrets.token_hex(3))
    try:
        built.put_up()
        try:
            yield built
        except BaseException:
            _take_down_quietly(built)
            raise
        with undisturbed():
            built.take_down()
    finally:
        engine.dispose()


def _take_down_quietly(built: Stage) -> None:
    """Take down after an error, which is not to be hidden by another one."""
    with undisturbed():
        try:
            built.take_down()
        except FenceguardError as error:
            complain(f"schema {built.schema} could not be removed: {error}")
