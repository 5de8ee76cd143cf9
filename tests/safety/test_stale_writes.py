"""Every way to write, under a token that is no longer the newest; the control writes to a plain table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
from support.sql import Connect, Connection, announce, claim, detail, refusal, scalar, sqlstate, writing

Write: TypeAlias = Callable[[Connection, str], object]

ROWS = "select id, balance from {} order by id"


@pytest.fixture
def accounts(pg: Connect) -> Connection:
    """Tables `account`, fenced, and `plain`, with the rows 42 and 43, each with a child that cascades."""
    connection = pg()
    for table, child in (("account", "account_entry"), ("plain", "plain_entry")):
        connection.execute(
            f"create table {table} (id int primary key, owner text default 'x', balance int not null)"
        )
        connection.execute(
            f"create table {child} (id serial primary key, account int references {table} on delete cascade)"
        )
        connection.execute(f"insert into {table} (id, balance) values (42, 100), (43, 100)")
        connection.execute(f"insert into {child} (account) values (42), (43)")
    connection.execute("select fenceguard.add_fence('account', 'bank', 'enforce')")
    return connection


def copy(connection: Connection, table: str) -> None:
    with connection.cursor().copy(f"copy {table} (id, balance) from stdin") as rows:
        rows.write_row((44, 0))


def run(query: str) -> Write:
    return lambda connection, table: connection.execute(query.format(table))


WRITES: dict[str, Write] = {
    "update": run("update {} set balance = 0 where id = 42"),
    "update of a row that the newer holder never touched": run("update {} set balance = 0 where id = 43"),
    "insert": run("insert into {} (id, balance) values (44, 0)"),
    "delete": run("delete from {} where id = 42"),
    "delete of a row that the newer holder never touched": run("delete from {} where id = 43"),
    "truncate": run("truncate {} cascade"),
    "copy": copy,
    "insert select": run("insert into {0} (id, balance) select id + 10, 0 from {0}"),
    "upsert that updates": run(
        "insert into {} (id, balance) values (42, 0) on conflict (id) do update set balance = 0"
    ),
    "upsert that inserts": run("insert into {} (id, balance) values (44, 0) on conflict (id) do nothing"),
    "merge": run(
        "merge into {} t using (values (42), (44)) v (id) on t.id = v.id "
        "when matched then update set balance = 0 when not matched then insert (id, balance) values (v.id, 0)"
    ),
    "update in a cte": run("with w as (update {} set balance = 0 returning id) select * from w"),
    "delete with using": run("delete from {} t using (values (42)) v (id) where t.id = v.id"),
    "update through a view": run("create temp view v as select * from {}; update v set balance = 0"),
    "update inside a function": run("do $$ begin update {} set balance = 0; end $$"),
}


@pytest.mark.case(
    "open transaction of a stale holder: every kind of write", control="test_control_every_write_lands"
)
@pytest.mark.parametrize("kind", WRITES)
def test_a_stale_write_of_any_kind_is_refused(accounts: Connection, pg: Connect, kind: str) -> None:
    old, new = pg(), pg()
    claim(old, "bank", 7, "ann")
    old.execute("begin")
    announce(old, ("bank", 7, "ann"))
    claim(new, "bank", 8, "bob")
    with writing(new, ("bank", 8, "bob")):
        new.execute("update account set balance = 1 where id = 42")
    before = accounts.execute(ROWS.format("account")).fetchall()

    error = None
    try:
        WRITES[kind](old, "account")
    except Exception as caught:
        error = caught
    old.execute("rollback")

    assert getattr(error, "sqlstate", None) == "ZF001"
    assert detail(error) == {"resource": "bank", "token": 7, "newest": 8, "table": "public.account", "key": None}
    assert accounts.execute(ROWS.format("account")).fetchall() == before


@pytest.mark.parametrize("kind", WRITES)
def test_control_every_write_lands(accounts: Connection, pg: Connect, kind: str) -> None:
    old, new = pg(), pg()
    old.execute("begin")
    new.execute("update plain set balance = 1 where id = 42")
    before = accounts.execute(ROWS.format("plain")).fetchall()

    WRITES[kind](old, "plain")
    old.execute("commit")

    assert accounts.execute(ROWS.format("plain")).fetchall() != before


@pytest.mark.parametrize("kind", WRITES)
def test_the_newest_holder_writes_in_every_way(accounts: Connection, pg: Connect, kind: str) -> None:
    connection = pg()
    claim(connection, "bank", 8)
    before = accounts.execute(ROWS.format("account")).fetchall()

    with writing(connection, ("bank", 8)):
        WRITES[kind](connection, "account")

    assert accounts.execute(ROWS.format("account")).fetchall() != before
    assert (
        scalar(accounts, "select count(*) from account where fence = 8") or "delete" in kind or kind == "truncate"
    )


@pytest.mark.parametrize("kind", WRITES)
def test_an_unannounced_write_of_any_kind_is_refused_at_enforce(accounts: Connection, kind: str) -> None:
    error = None
    try:
        WRITES[kind](accounts, "account")
    except Exception as caught:
        error = caught

    assert getattr(error, "sqlstate", None) == "ZF002"
    assert detail(error) == {"table": "public.account"}


# -- rows that no statement names


@pytest.fixture
def family(pg: Connect) -> Connection:
    """Parents without a fence, and a fenced child that follows them."""
    connection = pg()
    connection.execute("create table parent (id int primary key)")
    connection.execute("insert into parent values (1), (2)")
    connection.execute(
        "create table child (id int primary key, parent int references parent on delete cascade on update cascade)"
    )
    connection.execute("insert into child values (1, 1)")
    connection.execute("select fenceguard.add_fence('child', 'child:{id}', 'enforce')")
    return connection


@pytest.mark.parametrize("cascade", ["delete from parent where id = 1", "update parent set id = 3 where id = 1"])
def test_a_stale_cascade_is_refused_and_without_the_fence_it_lands(
    family: Connection, pg: Connect, cascade: str
) -> None:
    old = pg()
    claim(old, "child:1", 7, "ann")
    claim(old, "child:1", 8, "bob")
    old.execute("begin")
    announce(old, ("child:1", 7, "ann"))

    error = refusal(old, cascade)
    old.execute("rollback")
    family.execute("select fenceguard.drop_fence('child')")
    family.execute(cascade)

    assert error is not None
    assert error.sqlstate == "ZF001"
    assert detail(error)["table"] == "public.child"
    assert family.execute("select id, parent from child where parent = 1").fetchall() == []


def test_the_newest_holder_may_cascade(family: Connection, pg: Connect) -> None:
    connection = pg()
    claim(connection, "child:1", 7)

    with writing(connection, ("child:1", 7)):
        connection.execute("delete from parent where id = 1")

    assert scalar(family, "select count(*) from child") == 0


# -- the open transaction


@pytest.mark.case(
    "an open stale transaction cannot commit after the claim returned",
    control="test_control_a_fence_that_is_only_read_lets_a_stale_transaction_commit",
)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_a_transaction_that_wrote_holds_the_claim_off_and_one_that_did_not_is_refused(
    accounts: Connection, pg: Connect, isolation: str
) -> None:
    writer, idler, new = pg(), pg(), pg()
    claim(new, "bank", 7, "ann")
    for one in (writer, idler):
        one.execute(f"begin isolation level {isolation}")
        announce(one, ("bank", 7, "ann"))
        one.execute("select count(*) from account")
    writer.execute("update account set balance = 5 where id = 42")

    while_open = sqlstate(new, "select fenceguard.claim('bank', 8, 'bob', 0)")
    writer.execute("commit")
    claim(new, "bank", 8, "bob", wait_ms=0)
    idle = sqlstate(idler, "update account set balance = 6 where id = 43")

    assert while_open == "55P03"
    assert idle == "ZF001"
    assert accounts.execute(ROWS.format("account")).fetchall() == [(42, 5), (43, 100)]


def test_control_a_fence_that_is_only_read_lets_a_stale_transaction_commit(
    accounts: Connection, pg: Connect
) -> None:
    # What most recipes do: compare with the fence row in the writing statement, without a gate.
    old, new = pg(), pg()
    claim(new, "bank", 7, "ann")
    old.execute("begin")
    old.execute(
        "update plain set balance = 5 where id = 42 "
        "and 7 >= (select token from fenceguard.fence where resource = 'bank')"
    )
    claim(new, "bank", 8, "bob", wait_ms=0)
    new.execute("select balance from plain where id = 42")

    old.execute("commit")

    assert scalar(accounts, "select balance from plain where id = 42") == 5
