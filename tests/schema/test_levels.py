"""What the triggers of a fenced table let pass at `reject` and at `enforce`, and what they stamp."""

from __future__ import annotations

import pytest
from support.sql import Connect, Connection, announce, claim, detail, refusal, scalar, sqlstate, writing

ROWS = "select id, balance, fence from account order by id"


def make(connection: Connection, level: str, resource: str = "account:{id}") -> None:
    connection.execute("create table account (id int primary key, balance int not null default 0)")
    connection.execute("insert into account values (42, 100), (43, 100)")
    connection.execute("select fenceguard.add_fence('account', %s, %s)", (resource, level))


@pytest.mark.parametrize("level", ["reject", "enforce"])
def test_a_write_is_stamped_with_the_token_of_its_row(pg: Connect, level: str) -> None:
    connection = pg()
    make(connection, level)
    claim(connection, "account:42", 7)
    claim(connection, "account:44", 9)

    with writing(connection, ("account:42", 7), ("account:44", 9)):
        connection.execute("update account set balance = 1, fence = 1000 where id = 42")
        connection.execute("insert into account values (44, 2)")

    assert connection.execute(ROWS).fetchall() == [(42, 1, 7), (43, 100, 0), (44, 2, 9)]


@pytest.mark.parametrize("level", ["reject", "enforce"])
def test_the_holder_may_write_again_under_the_same_token(pg: Connect, level: str) -> None:
    connection = pg()
    make(connection, level)
    claim(connection, "account:42", 7)

    for balance in (1, 2):
        with writing(connection, ("account:42", 7)):
            connection.execute("update account set balance = %s where id = 42", (balance,))

    assert scalar(connection, "select balance from account where id = 42") == 2


@pytest.mark.parametrize("announcement", ["", "{}"])
def test_at_reject_unannounced_writes_pass_and_keep_the_old_stamp(pg: Connect, announcement: str) -> None:
    connection = pg()
    make(connection, "reject")
    claim(connection, "account:42", 7)
    with writing(connection, ("account:42", 7)):
        connection.execute("update account set balance = 1 where id = 42")

    connection.execute("begin")
    connection.execute("select set_config('fenceguard.grants', %s, true)", (announcement,))
    connection.execute("update account set balance = 2 where id = 42")
    connection.execute("insert into account values (44)")
    connection.execute("delete from account where id = 43")
    connection.execute("commit")

    assert connection.execute(ROWS).fetchall() == [(42, 2, 7), (44, 0, 0)]


@pytest.mark.parametrize("announcement", ["", "{}"])
def test_at_enforce_unannounced_writes_are_refused_even_where_no_row_matches(
    pg: Connect, announcement: str
) -> None:
    connection = pg()
    make(connection, "enforce")
    connection.execute("begin")
    connection.execute("select set_config('fenceguard.grants', %s, true)", (announcement,))

    error = refusal(connection, "update account set balance = 2 where false")

    assert error is not None
    assert error.sqlstate == "ZF002"
    assert detail(error) == {"table": "public.account"}


@pytest.mark.parametrize("level", ["reject", "enforce"])
@pytest.mark.parametrize(
    "write",
    [
        "update account set balance = 0 where id = 43",
        "update account set id = 45 where id = 42",
        "update account set id = 42 where id = 43",
        "insert into account values (44)",
        "delete from account where id = 43",
        "truncate account",
        "insert into account values (43) on conflict (id) do update set balance = 0",
    ],
)
def test_a_row_of_another_resource_is_refused(pg: Connect, level: str, write: str) -> None:
    connection = pg()
    make(connection, level)
    claim(connection, "account:42", 7)
    connection.execute("begin")
    announce(connection, ("account:42", 7))

    error = refusal(connection, write)
    connection.execute("rollback")

    assert error is not None
    assert error.sqlstate == "ZF004"
    told = detail(error)
    assert told.pop("resource") in {"account:43", "account:44", "account:45"}
    assert told == {"table": "public.account", "announced": ["account:42"]}
    assert connection.execute(ROWS).fetchall() == [(42, 100, 0), (43, 100, 0)]


def test_a_row_that_changes_its_resource_needs_both(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce")
    claim(connection, "account:42", 7)
    claim(connection, "account:45", 3)

    with writing(connection, ("account:42", 7), ("account:45", 3)):
        connection.execute("update account set id = 45 where id = 42")

    assert connection.execute(ROWS).fetchall() == [(43, 100, 0), (45, 100, 3)]


@pytest.mark.case(
    "case 43: row written under another resource with a larger token",
    control="test_control_compared_row_fences_refuse_it",
)
def test_a_row_stamped_with_a_larger_token_does_not_refuse_its_live_holder(pg: Connect) -> None:
    connection = pg()
    connection.execute("create table doc (id int primary key, owner text not null, body text default '')")
    connection.execute("insert into doc values (1, 'ann')")
    connection.execute("select fenceguard.add_fence('doc', 'owner:{owner}', 'enforce')")
    claim(connection, "owner:ann", 1000)
    claim(connection, "owner:bob", 3)
    with writing(connection, ("owner:ann", 1000), ("owner:bob", 3)):
        connection.execute("update doc set body = 'of ann'")
        connection.execute("update doc set owner = 'bob'")

    with writing(connection, ("owner:bob", 3)):
        connection.execute("update doc set body = 'of bob'")

    assert connection.execute("select owner, body, fence from doc").fetchall() == [("bob", "of bob", 3)]


def test_control_compared_row_fences_refuse_it(pg: Connect) -> None:
    connection = pg()
    connection.execute("create table doc (id int primary key, owner text, fence bigint not null default 0)")
    connection.execute("insert into doc values (1, 'bob', 1000)")

    written = connection.execute("update doc set fence = 3 where id = 1 and fence <= 3").rowcount

    assert written == 0


def test_truncate_passes_when_every_row_is_held(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce")
    claim(connection, "account:42", 7)
    claim(connection, "account:43", 9)

    with writing(connection, ("account:42", 7), ("account:43", 9)):
        connection.execute("truncate account")

    assert scalar(connection, "select count(*) from account") == 0


def test_any_resource_checks_whatever_is_announced_and_stamps_nothing(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce", "*")
    claim(connection, "job", 7)
    claim(connection, "other", 9)

    with writing(connection, ("job", 7)):
        connection.execute("update account set balance = 1")
    connection.execute("begin")
    announce(connection, ("job", 7), ("other", 8))
    refused = sqlstate(connection, "update account set balance = 2")
    connection.execute("rollback")

    assert refused == "ZF001"
    assert connection.execute(ROWS).fetchall() == [(42, 1, 0), (43, 1, 0)]


def test_a_constant_resource_owns_every_row(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce", "nightly {{job}} 100%")
    claim(connection, "nightly {job} 100%", 7)
    claim(connection, "other", 7)

    with writing(connection, ("nightly {job} 100%", 7)):
        connection.execute("update account set balance = 1")
    connection.execute("begin")
    announce(connection, ("other", 7))
    refused = sqlstate(connection, "update account set balance = 2")
    connection.execute("rollback")

    assert refused == "ZF004"
    assert connection.execute(ROWS).fetchall() == [(42, 1, 7), (43, 1, 7)]


# -- unfenced


def test_unfenced_lets_maintenance_pass_to_the_end_of_its_transaction(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce")
    connection.execute("begin")
    connection.execute("select fenceguard.unfenced('back-fill 2027-01')")
    connection.execute("update account set balance = 1")
    connection.execute("insert into account values (44)")
    connection.execute("delete from account where id = 43")
    connection.execute("commit")

    refused = sqlstate(connection, "update account set balance = 2")

    assert connection.execute(ROWS).fetchall() == [(42, 1, 0), (44, 0, 0)]
    assert refused == "ZF002"


def test_unfenced_ends_earlier_when_its_setting_is_emptied(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce")
    connection.execute("begin")
    connection.execute("select fenceguard.unfenced('back-fill')")
    connection.execute("select set_config('fenceguard.unfenced', '', true)")

    assert sqlstate(connection, "update account set balance = 1") == "ZF002"


def test_unfenced_reaches_rows_of_resources_that_are_not_announced(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce")
    claim(connection, "account:42", 7)

    with writing(connection, ("account:42", 7)):
        connection.execute("select fenceguard.unfenced('merge accounts')")
        connection.execute("update account set balance = 1")

    assert connection.execute(ROWS).fetchall() == [(42, 1, 7), (43, 1, 0)]


def test_unfenced_does_not_excuse_a_stale_token(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce")
    claim(connection, "account:42", 8)
    connection.execute("begin")
    announce(connection, ("account:42", 7))
    connection.execute("select fenceguard.unfenced('back-fill')")

    assert sqlstate(connection, "update account set balance = 1") == "ZF001"


@pytest.mark.parametrize("reason", ["null", "''", "'  '"])
def test_unfenced_without_a_reason_is_refused(pg: Connect, reason: str) -> None:
    assert sqlstate(pg(), f"select fenceguard.unfenced({reason})") == "22023"


def test_unfenced_is_logged_with_its_reason(pg: Connect) -> None:
    connection = pg()
    notices: list[str] = []
    connection.add_notice_handler(lambda notice: notices.append(str(notice.message_primary)))
    connection.execute("set client_min_messages = log")
    connection.execute("begin")
    xid = scalar(connection, "select pg_current_xact_id()::text")

    connection.execute("select fenceguard.unfenced('back-fill 2027-01')")

    assert notices == [f"fenceguard: postgres writes unfenced in transaction {xid}: back-fill 2027-01"]


@pytest.mark.parametrize("mark", ["forged", "0 ", "1 back-fill"])
def test_a_mark_left_at_session_level_unfences_nothing(pg: Connect, mark: str) -> None:
    connection = pg()
    make(connection, "enforce")
    connection.execute("select set_config('fenceguard.unfenced', %s, false)", (mark,))

    assert sqlstate(connection, "update account set balance = 1") == "ZF002"


def test_a_savepoint_rolled_back_takes_unfenced_with_it(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce")
    connection.execute("begin")
    connection.execute("savepoint s")
    connection.execute("select fenceguard.unfenced('back-fill')")
    connection.execute("rollback to savepoint s")

    assert sqlstate(connection, "update account set balance = 1") == "ZF002"


# -- announcements left at session level


@pytest.mark.parametrize("level", ["reject", "enforce"])
def test_an_announcement_left_at_session_level_is_checked_like_any_other(pg: Connect, level: str) -> None:
    connection = pg()
    make(connection, level)
    claim(connection, "account:42", 7)
    connection.execute("""set fenceguard.grants = '{"account:42": {"token": 7, "owner": "a"}}'""")
    connection.execute("update account set balance = 1 where id = 42")
    claim(connection, "account:42", 8)

    refused = sqlstate(connection, "update account set balance = 2 where id = 42")

    assert refused == "ZF001"


# -- partitions


def make_partitions(connection: Connection, level: str = "enforce") -> None:
    """A tree: `entry` by id, its second partition split again."""
    connection.execute("create table entry (id int not null, body text default '') partition by range (id)")
    connection.execute("create table entry_0 partition of entry for values from (0) to (10)")
    connection.execute(
        "create table entry_1 partition of entry for values from (10) to (20) partition by list (id)"
    )
    connection.execute("create table entry_10 partition of entry_1 for values in (10)")
    connection.execute("create table entry_1x partition of entry_1 default")
    connection.execute("insert into entry values (1), (10), (11)")
    connection.execute("select fenceguard.add_fence('entry', 'entry:{id}', %s)", (level,))


@pytest.mark.parametrize(
    ("table", "row"),
    [("entry", 1), ("entry", 10), ("entry_0", 1), ("entry_1", 11), ("entry_10", 10), ("entry_1x", 11)],
)
def test_every_partition_is_fenced_like_the_whole(pg: Connect, table: str, row: int) -> None:
    connection = pg()
    make_partitions(connection)
    for other in (1, 10, 11):
        claim(connection, f"entry:{other}", 8)

    unannounced = sqlstate(connection, f"update {table} set body = 'x' where id = {row}")
    truncated = sqlstate(connection, f"truncate {table}")
    connection.execute("begin")
    announce(connection, (f"entry:{row}", 7))
    stale = refusal(connection, f"update {table} set body = 'x' where false")
    connection.execute("rollback")
    with writing(connection, (f"entry:{row}", 8)):
        connection.execute(f"update {table} set body = 'new' where id = {row}")

    assert unannounced == "ZF002"
    assert truncated == "ZF002"
    assert stale is not None
    assert stale.sqlstate == "ZF001"
    assert detail(stale)["table"] == f"public.{table}"
    assert connection.execute("select id, fence from entry where body = 'new'").fetchall() == [(row, 8)]


def test_a_row_that_moves_between_partitions_needs_both_resources(pg: Connect) -> None:
    connection = pg()
    make_partitions(connection)
    claim(connection, "entry:1", 7)
    claim(connection, "entry:12", 3)
    connection.execute("begin")
    announce(connection, ("entry:1", 7))
    refused = sqlstate(connection, "update entry set id = 12 where id = 1")
    connection.execute("rollback")

    with writing(connection, ("entry:1", 7), ("entry:12", 3)):
        connection.execute("update entry set id = 12 where id = 1")

    assert refused == "ZF004"
    assert connection.execute("select tableoid::regclass::text, fence from entry where id = 12").fetchall() == [
        ("entry_1x", 3)
    ]


@pytest.mark.parametrize("resource", ["entry:{id}", "*"])
@pytest.mark.parametrize("write", ["update", "insert", "delete"])
def test_a_partition_attached_later_is_entered_by_its_rows(pg: Connect, resource: str, write: str) -> None:
    connection = pg()
    connection.execute("create table entry (id int not null, body text default '') partition by range (id)")
    connection.execute("select fenceguard.add_fence('entry', %s, 'enforce')", (resource,))
    connection.execute(
        "create table entry_0 (body text default '', fence bigint not null default 0, id int not null)"
    )
    connection.execute("insert into entry_0 (id) values (1)")
    connection.execute("alter table entry attach partition entry_0 for values from (0) to (10)")
    claim(connection, "entry:1", 8)
    query = {
        "update": "update entry_0 set body = 'x'",
        "insert": "insert into entry_0 (id) values (1)",
        "delete": "delete from entry_0",
    }[write]

    unannounced = sqlstate(connection, query)
    connection.execute("begin")
    announce(connection, ("entry:1", 7))
    stale = refusal(connection, query)
    connection.execute("rollback")
    with writing(connection, ("entry:1", 8)):
        connection.execute(query)

    assert unannounced == "ZF002"
    assert stale is not None
    assert stale.sqlstate == "ZF001"
    assert detail(stale)["table"] == "public.entry_0"
    stamps = {fence for (fence,) in connection.execute("select fence from entry where body = 'x'")}
    assert stamps == ({8 if resource != "*" else 0} if write == "update" else set())


# -- other triggers


def test_what_another_trigger_makes_of_the_row_is_what_is_checked_and_stamped(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce")
    connection.execute(
        "create function move() returns trigger language plpgsql as "
        "$$ begin new.id := new.id + 1; new.fence := 99; return new; end $$"
    )
    connection.execute("create trigger zzz before insert on account for each row execute function move()")
    claim(connection, "account:50", 7)
    claim(connection, "account:51", 8)
    connection.execute("begin")
    announce(connection, ("account:50", 7))
    refused = sqlstate(connection, "insert into account values (50)")
    connection.execute("rollback")

    with writing(connection, ("account:51", 8)):
        connection.execute("insert into account values (50)")

    assert refused == "ZF004"
    assert connection.execute("select id, fence from account where id > 43").fetchall() == [(51, 8)]


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_truncate_is_refused_where_the_snapshot_may_miss_rows_of_others(pg: Connect, isolation: str) -> None:
    old, other = pg(), pg()
    make(old, "enforce")
    for resource in ("account:42", "account:43", "account:44"):
        claim(old, resource, 7)

    old.execute(f"begin isolation level {isolation}")
    announce(old, ("account:42", 7), ("account:43", 7))
    old.execute("select from account")
    with writing(other, ("account:44", 7)):
        other.execute("insert into account values (44, 1)")
    refused = sqlstate(old, "truncate account")
    old.execute("rollback")

    assert refused == "0A000"
    assert scalar(other, "select balance from account where id = 44") == 1


def test_truncate_is_refused_where_row_security_hides_rows_of_others(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce")
    connection.execute("alter table account enable row level security, force row level security")
    connection.execute("create policy own on account using (id = 42)")
    connection.execute("drop role if exists fg_teller")
    connection.execute("create role fg_teller nosuperuser")
    connection.execute("grant all on account to fg_teller; grant usage on schema fenceguard to fg_teller")
    connection.execute("grant execute on all functions in schema fenceguard to fg_teller")
    claim(connection, "account:42", 7)

    connection.execute("begin; set local role fg_teller")
    announce(connection, ("account:42", 7))
    refused = sqlstate(connection, "truncate account")
    connection.execute("rollback")
    connection.execute("drop owned by fg_teller; drop role fg_teller")

    assert refused == "0A000"
    assert scalar(connection, "select count(*) from account") == 2


@pytest.mark.parametrize("template", ["a%ount:{id}", "a%s:{id}", "50%%:{id}", "%L%1$s{id}"])
def test_percent_signs_in_a_template_stand_for_themselves(pg: Connect, template: str) -> None:
    connection = pg()
    make(connection, "enforce", template)
    resources = [template.replace("{id}", number) for number in ("42", "43")]
    for resource in resources:
        claim(connection, resource, 7)

    with writing(connection, *((resource, 7) for resource in resources)):
        connection.execute("update account set balance = 1 where id = 42")
        connection.execute("truncate account")

    assert scalar(connection, "select count(*) from account") == 0


def test_what_a_transaction_has_entered_is_looked_at_again_after_its_own_claim(pg: Connect) -> None:
    connection = pg()
    make(connection, "enforce")
    claim(connection, "account:42", 7)

    connection.execute("begin")
    announce(connection, ("account:42", 7))
    connection.execute("update account set balance = 1 where id = 42")
    claim(connection, "account:42", 8, "b")
    refused = sqlstate(connection, "update account set balance = 2 where id = 42")
    connection.execute("rollback")

    assert refused == "ZF001"
