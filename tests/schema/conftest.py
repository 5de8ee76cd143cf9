from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest
from psycopg import sql
from support.sql import Connect


@pytest.fixture
def role(pg: Connect) -> Iterator[Callable[[str], str]]:
    """A factory of roles that may nothing; they are gone with what they own when the test ends."""
    made: list[str] = []
    connection = pg()

    def make(stem: str) -> str:
        name = f"fg_{stem}_{secrets.token_hex(4)}"
        connection.execute(sql.SQL("create role {}").format(sql.Identifier(name)))
        made.append(name)
        return name

    yield make
    for name in made:
        connection.execute(sql.SQL("drop owned by {} cascade").format(sql.Identifier(name)))
    for name in made:
        connection.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))
