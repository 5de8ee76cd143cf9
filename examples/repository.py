"""A repository whose writes are fenced, in one file: ``python examples/repository.py`` (needs the extra `all`).

It brings its own servers. In an application the schema comes from ``fenceguard migrate up`` and the table's fence
from ``op.add_fence`` in a migration; the rest is as here.
"""

from __future__ import annotations

import redis
from sqlalchemy import create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fenceguard import Fenced, Guard, StaleToken, embedded, fence, schema


class Base(DeclarativeBase):
    pass


class Account(Fenced, Base):
    __tablename__ = "account"
    __fence_resource__ = "account:{id}"
    __fence_level__ = "enforce"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


guard = Guard(ttl=10.0)


class Accounts:
    def __init__(self, sessions: sessionmaker[Session]) -> None:
        self.sessions = sessions

    @guard.fenced("account:{account_id}", wait=5.0)
    def withdraw(self, account_id: int, amount: int) -> int:
        """Withdraw, and return the balance; one worker at a time, and Postgres sees to it."""
        with self.sessions.begin() as session:
            account = session.get_one(Account, account_id)
            account.balance -= amount
            return account.balance


def main() -> None:
    with embedded.pair() as servers, redis.Redis.from_url(servers.valkey.url) as leases:
        engine = create_engine(servers.postgres.url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            schema.install(connection)
            connection.execute(text("create table account (id int primary key, balance int not null)"))
            connection.execute(text("insert into account values (42, 100)"))
            connection.execute(text("select fenceguard.add_fence('account', 'account:{id}', 'enforce')"))

        guard.bind(leases, engine)
        sessions = guard.sessions()
        print("balance:", Accounts(sessions).withdraw(42, 30))

        with guard.hold("account:42") as held:
            # As if this process had slept past its lease, and another worker had taken over meanwhile:
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                fence.claim(connection, "account:42", held.token + 1, "another worker")
            try:
                with sessions.begin() as session:
                    session.execute(text("update account set balance = 0"))
            except StaleToken as refused:
                print("refused:", refused)

        with sessions() as session:
            print("balance:", session.get_one(Account, 42).balance)
        guard.close()
        engine.dispose()


if __name__ == "__main__":
    main()
