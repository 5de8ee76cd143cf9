"""A claim that a crash forgets would let its token be claimed twice: it commits synchronously, always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from support.sql import claim, scalar
from support.urls import driver

from fenceguard import embedded, schema


@pytest.mark.case("the server is killed right after a claim under synchronous_commit = off", control="inside")
def test_after_a_crash_the_claim_is_there_and_a_plain_commit_is_not(
    own_postgres: Callable[..., embedded.Server],
) -> None:
    # Nobody else writes out the log meanwhile: what a commit does not flush dies with the server.
    server: Any = own_postgres(
        synchronous_commit="off", wal_writer_delay="10s", checkpoint_timeout="1h", autovacuum="off"
    )
    engine = create_engine(driver(server.url, "psycopg"))
    with engine.connect() as connection:
        schema.install(connection)
    engine.dispose()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("create table plain (id int)")
        connection.execute("checkpoint")
        claim(connection, "account:42", 7, "ann")
        connection.execute("insert into plain values (1)")
        flushed, written = connection.execute(
            "select pg_current_wal_flush_lsn(), pg_current_wal_insert_lsn()"
        ).fetchone() or ("", "")
        server.kill()

    server.restart()

    with psycopg.connect(server.url, autocommit=True) as connection:
        assert connection.execute("select resource, token, owner from fenceguard.fence").fetchall() == [
            ("account:42", 7, "ann")
        ]
        assert scalar(connection, "select count(*) from plain") == 0  # the control
    assert flushed != written
