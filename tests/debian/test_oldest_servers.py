"""The promise on the oldest servers that are supported: Postgres 15 and Redis 7.0, from Debian's packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import redis
from support.debian import postgres_15, redis_7

pytestmark = pytest.mark.debian

ROOT = Path(__file__).resolve().parents[2]
WITHIN = 290.0
"""Seconds; ends the run before the budget of the step in .ci/run does, which would show nothing."""


def test_the_rooms_tests_pass_on_postgres_15_and_redis_7() -> None:
    """Runs the tests of lease, schema, fence, guard and safety once more, on these two servers."""
    with postgres_15() as postgres_url, redis_7() as redis_url:
        with psycopg.connect(postgres_url) as connection, redis.Redis.from_url(redis_url) as client:
            versions = (connection.info.server_version // 10_000, client.info("server")["redis_version"])
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-m", "not debian"]
            + [f"tests/{room}" for room in ("lease", "schema", "fence", "guard", "safety")],
            cwd=ROOT,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))},
                "FENCEGUARD_TEST_SERVICES": "env",
                "FENCEGUARD_TEST_POSTGRES_URL": postgres_url,
                "FENCEGUARD_TEST_REDIS_URL": redis_url,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=WITHIN,
        )
    assert versions[0] == 15
    assert versions[1].startswith("7.0.")
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-5_000:]
