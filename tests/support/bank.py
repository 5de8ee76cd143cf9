"""The tests' example: a table of accounts with a fence, and its twin without one, for the control."""

from __future__ import annotations

from sqlalchemy import BigInteger
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fenceguard import Fenced
from support.sql import Connection

KEY = "account:42"
"""The resource of the account that most tests write to."""


class Base(DeclarativeBase):
    pass


class Account(Fenced, Base):
    __tablename__ = "account"
    __fence_resource__ = "account:{id}"
    __fence_level__ = "enforce"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    balance: Mapped[int] = mapped_column(BigInteger)


class Plain(Base):
    """The control: the same table without a fence."""

    __tablename__ = "plain"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    balance: Mapped[int] = mapped_column(BigInteger)


def open_bank(connection: Connection) -> None:
    """Make both tables, with accounts 40 to 44 at a balance of 100."""
    for table in ("account", "plain"):
        connection.execute(f"create table {table} (id bigint primary key, balance bigint not null)")
        connection.execute(f"insert into {table} select n, 100 from generate_series(40, 44) n")
    connection.execute("select fenceguard.add_fence('account', 'account:{id}', 'enforce')")


def balance(connection: Connection, table: str, account: int = 42) -> int | None:
    """Return an account's balance as it is committed, or `None` when there is no such row."""
    row = connection.execute(f"select balance from {table} where id = %s", (account,)).fetchone()
    return None if row is None else row[0]
