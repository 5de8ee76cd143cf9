"""What is in a database and in a Redis, so that a test can say that nothing was left behind."""

from __future__ import annotations

from typing import Any

import psycopg
from redis import Redis

OBJECTS = """
    select 'schema', nspname::text, coalesce(obj_description(oid, 'pg_namespace'), '') from pg_namespace
        where nspname !~ '^pg_(toast|temp)'
    union all select 'relation', oid::regclass::text, relkind::text from pg_class
        where oid >= 16384 and relnamespace <> 'pg_toast'::regnamespace
    union all select 'function', oid::regprocedure::text, md5(prosrc) from pg_proc where oid >= 16384
    union all select 'trigger', tgrelid::regclass || ' ' || tgname, tgenabled::text from pg_trigger
    order by 1, 2, 3
"""


def objects(url: str) -> list[tuple[Any, ...]]:
    """Return every object of a database that is not Postgres' own, with a digest of each function."""
    with psycopg.connect(url) as connection:
        return connection.execute(OBJECTS).fetchall()


def everything(url: str, redis_url: str) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], list[Any]]:
    """Return the objects of a database, the fences in it, and the keys of a Redis."""
    found = objects(url)
    fences: list[tuple[Any, ...]] = []
    if ("schema", "fenceguard") in [row[:2] for row in found]:
        with psycopg.connect(url) as connection:
            fences = connection.execute("select * from fenceguard.fence order by resource").fetchall()
    with Redis.from_url(redis_url) as client:
        keys: list[Any] = client.keys("*")
    return found, fences, sorted(keys)
