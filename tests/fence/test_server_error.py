"""What a server's error says, whichever driver raised it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from fenceguard._server_error import ServerError, server_error

RAISE = text("do $$ begin raise exception using errcode = 'ZZ999', message = 'm', detail = 'd', hint = 'h'; end $$")
SAID = ServerError("ZZ999", "m", "d", "h", None)


def test_of_psycopg_all_is_read(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(DBAPIError) as caught:
        connection.execute(RAISE)
    assert server_error(caught.value) == SAID
    assert server_error(caught.value.orig) == SAID  # type: ignore[arg-type]


async def test_of_asyncpg_all_is_read_also_behind_sqlalchemys_adapter(async_engine: AsyncEngine) -> None:
    async with async_engine.connect() as connection:
        with pytest.raises(DBAPIError) as caught:
            await connection.execute(RAISE)
    adapted = caught.value.orig
    assert [server_error(error) for error in (caught.value, adapted, adapted.__cause__)] == [SAID, SAID, SAID]


def test_the_position_counts_characters_from_1(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(DBAPIError) as caught:
        connection.execute(text("select nosuch"))
    assert server_error(caught.value).position == 8


def test_of_psycopg_2_which_calls_the_sqlstate_otherwise_all_is_read() -> None:
    class OfPsycopg2(Exception):
        pgcode = "ZZ999"
        diag = SimpleNamespace(
            sqlstate="ZZ999", message_primary="m", message_detail="d", message_hint="h", statement_position=None
        )

    assert server_error(OfPsycopg2()) == SAID


def test_where_no_server_has_spoken_nothing_is_read() -> None:
    assert server_error(OSError("refused")) == ServerError(None, None, None, None, None)
