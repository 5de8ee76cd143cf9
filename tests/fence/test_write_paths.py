"""Every way that SQLAlchemy writes: a stale holder is refused by Postgres, the newest one writes and stamps.

Each stale write is made to the twin table without a fence as well, where it lands: that is the damage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import psycopg
import pytest
from fence_talk import ACCOUNTS, Holds, all_claimed
from sqlalchemy import Engine, delete, exists, insert, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import Session
from support.bank import Account, Plain

from fenceguard import StaleToken

Bank = psycopg.Connection[Any]
Model: TypeAlias = type[Account | Plain]
WRITES: dict[str, Callable[[Session, Model], object]] = {}

NEW = 99

DRIVERS = ("psycopg", "asyncpg")  # async psycopg sends what psycopg sends


def way(write: Callable[[Session, Model], object]) -> Callable[[Session, Model], object]:
    WRITES[write.__name__] = write
    return write


@way
def flush_of_one_update(session: Session, model: Model) -> None:
    session.get_one(model, 42).balance = 1
    session.flush()


@way
def flush_of_many_updates(session: Session, model: Model) -> None:
    for row in session.scalars(select(model)):
        row.balance = 1
    session.flush()


@way
def flush_of_an_insert(session: Session, model: Model) -> None:
    session.add(model(id=NEW, balance=1))
    session.flush()


@way
def flush_of_a_delete(session: Session, model: Model) -> None:
    session.delete(session.get_one(model, 42))
    session.flush()


@way
def flush_of_many_deletes(session: Session, model: Model) -> None:
    for row in session.scalars(select(model)):
        session.delete(row)
    session.flush()


@way
def merge(session: Session, model: Model) -> None:
    session.merge(model(id=42, balance=1))
    session.flush()


@way
def bulk_update_mappings(session: Session, model: Model) -> None:
    session.bulk_update_mappings(model, [{"id": account, "balance": 1} for account in ACCOUNTS])


@way
def bulk_insert_mappings(session: Session, model: Model) -> None:
    session.bulk_insert_mappings(model, [{"id": NEW, "balance": 1}])


@way
def bulk_save_objects(session: Session, model: Model) -> None:
    session.bulk_save_objects([model(id=NEW, balance=1)])


@way
def update_by_primary_key(session: Session, model: Model) -> None:
    session.execute(update(model), [{"id": account, "balance": 1} for account in ACCOUNTS])


@way
def update_with_evaluate(session: Session, model: Model) -> None:
    session.execute(
        update(model).where(model.id == 42).values(balance=1), execution_options={"synchronize_session": "evaluate"}
    )


@way
def update_with_fetch(session: Session, model: Model) -> None:
    session.execute(
        update(model).where(model.id == 42).values(balance=1), execution_options={"synchronize_session": "fetch"}
    )


@way
def update_without_synchronizing(session: Session, model: Model) -> None:
    session.execute(update(model).values(balance=1), execution_options={"synchronize_session": False})


@way
def update_returning(session: Session, model: Model) -> None:
    session.execute(update(model).where(model.id == 42).values(balance=1).returning(model.balance)).all()


@way
def update_of_a_query(session: Session, model: Model) -> None:
    session.query(model).filter(model.id == 42).update({"balance": 1})


@way
def delete_of_a_query(session: Session, model: Model) -> None:
    session.query(model).filter(model.id == 42).delete()


@way
def delete_with_fetch(session: Session, model: Model) -> None:
    session.execute(delete(model).where(model.id == 42), execution_options={"synchronize_session": "fetch"})


@way
def delete_using(session: Session, model: Model) -> None:
    other = model.__table__.alias()
    session.execute(
        delete(model.__table__).where(model.__table__.c.id == other.c.id, other.c.id == 42)  # type: ignore[arg-type]
    )


@way
def core_executemany(session: Session, model: Model) -> None:
    session.connection().execute(
        text(f"update {model.__tablename__} set balance = :balance where id = :id"),
        [{"id": account, "balance": 1} for account in ACCOUNTS],
    )


@way
def core_insert_of_many(session: Session, model: Model) -> None:
    session.connection().execute(insert(model.__table__), [{"id": NEW, "balance": 1}])  # type: ignore[arg-type]


@way
def upsert_of_one(session: Session, model: Model) -> None:
    values = upsert(model).values(id=42, balance=1)
    session.execute(values.on_conflict_do_update(index_elements=["id"], set_={"balance": 1}))


@way
def upsert_of_many(session: Session, model: Model) -> None:
    statement = upsert(model.__table__).on_conflict_do_update(index_elements=["id"], set_={"balance": 1})  # type: ignore[arg-type]
    session.connection().execute(statement, [{"id": account, "balance": 1} for account in (*ACCOUNTS, NEW)])


@way
def update_in_a_cte(session: Session, model: Model) -> None:
    changed = update(model).where(model.id == 42).values(balance=1).returning(model.id).cte()
    session.execute(select(exists(select(changed.c.id)))).all()


@way
def plain_sql(session: Session, model: Model) -> None:
    session.execute(text(f"update {model.__tablename__} set balance = 1 where id = 42"))


@way
def sql_of_the_driver(session: Session, model: Model) -> None:
    session.connection().exec_driver_sql(f"delete from {model.__tablename__} where id = 42")


@way
def truncate(session: Session, model: Model) -> None:
    session.execute(text(f"truncate {model.__tablename__}"))


def rows(bank: Bank, table: str) -> list[tuple[int, int]]:
    return bank.execute(f"select id, balance from {table} order by id").fetchall()


def ways(*without: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "write", [pytest.param(WRITES[name], id=name) for name in WRITES if name not in without]
    )


@pytest.mark.case("every way that SQLAlchemy writes, by a stale holder", control="inside")
@ways()
def test_a_stale_write_is_refused_by_postgres_and_lands_where_no_fence_is(
    attached: Engine, holds: Holds, bank: Bank, write: Callable[[Session, Model], object]
) -> None:
    holds.grants = all_claimed(bank, 7, (*ACCOUNTS, NEW), "stale")
    before = rows(bank, "account")
    with Session(attached) as session, session.begin():
        write(session, Plain)
        all_claimed(bank, 8, (*ACCOUNTS, NEW), "newer")
    with Session(attached) as session, pytest.raises(StaleToken) as caught, session.begin():
        write(session, Account)
    refused = caught.value
    assert refused.__cause__.sqlstate == "ZF001"  # type: ignore[union-attr]
    assert (refused.token, refused.newest, refused.table) == (7, 8, "public.account")
    assert refused.resource in {claim.resource for claim in holds.grants}
    assert rows(bank, "account") == before
    assert rows(bank, "plain") != before


@ways("truncate")  # of rows of several resources: for unfenced
def test_the_newest_holder_writes_and_stamps(
    attached: Engine, holds: Holds, bank: Bank, write: Callable[[Session, Model], object]
) -> None:
    all_claimed(bank, 7, (*ACCOUNTS, NEW), "stale")
    holds.grants = all_claimed(bank, 8, (*ACCOUNTS, NEW), "newest")
    with Session(attached) as session, session.begin():
        write(session, Plain)
        write(session, Account)
    assert rows(bank, "account") == rows(bank, "plain")
    stamped = bank.execute("select id from account where fence = 8").fetchall()
    changed = bank.execute("select id from account where balance = 1").fetchall()
    assert stamped == changed
