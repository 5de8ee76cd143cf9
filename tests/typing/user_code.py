"""What users' type checkers see; checked by mypy and pyright, never run."""

from __future__ import annotations

from typing import assert_type

import redis
import redis.asyncio
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from fenceguard import AsyncGuard, Grant, Guard, Held, LeaseClient, StaleToken

guard = Guard(redis.Redis(), create_engine("postgresql+psycopg://"), ttl=10.0)
async_guard = AsyncGuard()
async_guard.bind(redis.asyncio.Redis(), create_async_engine("postgresql+asyncpg://"))
assert_type(guard.sessions(), sessionmaker[Session])
assert_type(async_guard.sessions(), async_sessionmaker[AsyncSession])


class Accounts:
    @guard.fenced("account:{account_id}", wait=5.0)
    def deposit(self, account_id: int, amount: int = 1) -> str:
        return f"{account_id}: {amount}"

    @guard.fenced("account:{account_id}", on_unavailable="skip")
    def close(self, account_id: int) -> str:
        return f"{account_id}"

    @async_guard.fenced("account:{account_id}")
    async def withdraw(self, account_id: int) -> int:
        return account_id

    @async_guard.fenced("account:{account_id}", on_unavailable="skip")
    async def freeze(self, account_id: int) -> int:
        return account_id

    @classmethod
    @guard.fenced("accounts")
    def count(cls) -> int:
        return 0

    @staticmethod
    @guard.fenced("accounts")
    def total() -> int:
        return 0


accounts = Accounts()
assert_type(accounts.deposit(42, amount=2), str)
assert_type(accounts.close(42), str | None)
assert_type(Accounts.count(), int)
assert_type(accounts.total(), int)
accounts.deposit("42")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType] the parameters are kept


async def use() -> None:
    assert_type(await accounts.withdraw(42), int)
    assert_type(await accounts.freeze(42), int | None)
    async with async_guard.hold("account:42", wait=5.0) as held:
        assert_type(held, Held)
        assert_type(held.grant, Grant)


with guard.hold("account:42") as held:
    assert_type(held.token, int)
    assert_type(held.remaining(), float)

client = LeaseClient(redis.Redis())
assert_type(client.try_acquire("account:42"), Grant | None)
assert_type(StaleToken("account:42", 1, 2).newest, int)
