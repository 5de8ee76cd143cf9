"""Sessions that are given their grants, and sessionmakers that exist already."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from fence_talk import Holds, announced, claimed, told
from sqlalchemy import Engine, create_engine, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from support.bank import Account, balance

from fenceguard import Claim, StaleToken
from fenceguard.fence.session import (
    async_sessions,
    attach,
    attach_sessionmaker,
    await_in_session,
    sessions,
)

Bank = psycopg.Connection[Any]

OTHER = Claim("account:43", 3, "b")


class Marked(Session):
    """A session class of a user's own."""


def test_a_session_announces_the_grant_that_it_was_given_and_no_other_does(any_engine: Engine, bank: Bank) -> None:
    mine = claimed(bank, 7)
    factory = sessions(any_engine)
    with factory(grant=mine) as given, factory() as other:
        assert announced(given) == told(mine)
        assert announced(other) == {}
        given.execute(update(Account).where(Account.id == 42).values(balance=1))
        given.commit()
        assert announced(given) == told(mine)
    assert balance(bank, "account") == 1


def test_a_session_given_an_old_grant_is_refused(any_engine: Engine, bank: Bank) -> None:
    mine = claimed(bank, 7)
    claimed(bank, 8, owner="newer")
    with sessions(any_engine)(grant=mine) as session, pytest.raises(StaleToken):
        session.execute(update(Account).values(balance=1))
    assert balance(bank, "account") == 100


def test_given_grants_are_announced_beside_those_of_the_context(attached: Engine, holds: Holds, bank: Bank) -> None:
    holds.grants = [OTHER]
    mine = claimed(bank, 7)
    with sessions(attached)(grant=[mine]) as session:
        assert announced(session) == told(OTHER, mine)


def test_a_given_grant_leaves_a_joined_transaction_with_its_session(any_engine: Engine, bank: Bank) -> None:
    mine = claimed(bank, 7)
    with any_engine.begin() as connection:
        assert announced(connection) == {}
        with sessions()(bind=connection, grant=mine) as session:
            with session.begin_nested():
                assert announced(session) == told(mine)
            session.commit()
            assert announced(session) == told(mine)
        assert announced(connection) == {}


def test_a_session_class_of_one_s_own_is_kept(any_engine: Engine) -> None:
    with sessions(any_engine, class_=Marked, expire_on_commit=False)(grant=OTHER) as session:
        assert isinstance(session, Marked)
        assert announced(session) == told(OTHER)


def test_a_sessionmaker_that_exists_is_attached_with_its_class(any_engine: Engine, holds: Holds) -> None:
    factory = sessionmaker(any_engine, class_=Marked)
    attach_sessionmaker(factory, holds)
    attach_sessionmaker(factory, holds)
    holds.grants = [OTHER]
    with factory() as session, factory(grant=Claim("x", 1, "c")) as given:
        assert isinstance(session, Marked)
        assert announced(session) == told(OTHER)
        assert announced(given) == told(OTHER, Claim("x", 1, "c"))


def test_every_engine_of_a_sessionmaker_is_attached(any_engine: Engine, holds: Holds) -> None:
    attach_sessionmaker(sessionmaker(binds={Account: any_engine}), holds)
    holds.grants = [OTHER]
    with any_engine.begin() as connection:
        assert announced(connection) == told(OTHER)


def test_a_sessionmaker_without_an_engine_is_refused_with_the_remedy(holds: Holds) -> None:
    with pytest.raises(ValueError, match="bind it first"):
        attach_sessionmaker(sessionmaker(), holds)


def test_an_engine_of_another_database_is_refused(holds: Holds) -> None:
    engine = create_engine("sqlite://")
    with pytest.raises(ValueError, match="sqlite"):
        attach(engine, holds)


# -- asyncio


@pytest.fixture
def announcing(async_engine: AsyncEngine, holds: Holds) -> AsyncEngine:
    attach(async_engine, holds)
    return async_engine


async def test_an_async_session_announces_context_and_given_grants(announcing: AsyncEngine, holds: Holds) -> None:
    holds.grants = [OTHER]
    async with async_sessions(announcing)(grant=Claim("x", 1, "c")) as session:
        assert await session.run_sync(announced) == told(OTHER, Claim("x", 1, "c"))


async def test_an_async_sessionmaker_that_exists_is_attached(async_engine: AsyncEngine, holds: Holds) -> None:
    class Own(AsyncSession):
        sync_session_class = Marked

    factory = async_sessionmaker(async_engine, class_=Own)
    attach_sessionmaker(factory, holds)
    holds.grants = [OTHER]
    async with factory(grant=Claim("x", 1, "c")) as session:
        assert isinstance(session, Own)
        assert isinstance(session.sync_session, Marked)
        assert await session.run_sync(announced) == told(OTHER, Claim("x", 1, "c"))


async def test_a_source_may_await_at_begin(async_engine: AsyncEngine) -> None:
    class Awaiting(Holds):
        def at_begin(self) -> list[Claim]:
            self.grants = await_in_session(self.look())
            return self.grants

        async def look(self) -> list[Claim]:
            await asyncio.sleep(0)
            return [OTHER]

    attach(async_engine, Awaiting())
    async with AsyncSession(async_engine) as session:
        assert await session.run_sync(announced) == told(OTHER)


async def test_the_row_fence_shows_the_stamp_after_a_flush_without_a_query(
    announcing: AsyncEngine, holds: Holds, bank: Bank
) -> None:
    holds.grants = [claimed(bank, 7), claimed(bank, 7, "account:99")]
    async with AsyncSession(announcing, expire_on_commit=False) as session:
        account, new = await session.get_one(Account, 42), Account(id=99, balance=5)
        session.add(new)
        account.balance = 1
        await session.commit()
        assert (account.fence, new.fence) == (7, 7)
        holds.grants = [claimed(bank, 9)]
        account.balance = 2
        await session.commit()
        assert account.fence == 9
