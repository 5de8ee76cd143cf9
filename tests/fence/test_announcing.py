"""Before every statement the transaction's announcement equals the grants of the context."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from fence_talk import KEY, Holds, announced, claimed, told
from sqlalchemy import Connection, Engine, event, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.bank import Account, Plain, balance

from fenceguard import Claim, LeaseLost, UnfencedWrite
from fenceguard.fence.session import attach

Bank = psycopg.Connection[Any]

SEVEN = Claim(KEY, 7, "a")
OTHER = Claim("account:43", 3, "b")


def withdraw(on: Session | Connection, model: type[Account | Plain] = Account) -> None:
    on.execute(update(model).where(model.id == 42).values(balance=1))


def test_a_session_announces_what_is_held_when_it_begins(attached: Engine, holds: Holds) -> None:
    holds.grants = [SEVEN, OTHER]
    with Session(attached) as session:
        assert announced(session) == told(SEVEN, OTHER)


def test_a_transaction_without_a_hold_announces_nothing(attached: Engine) -> None:
    with Session(attached) as session:
        assert announced(session) == {}


@pytest.mark.case("case 33: a session begun before the hold", control="inside")
def test_a_session_begun_before_the_hold_announces_before_its_next_statement(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    with Session(attached) as session:
        account = session.get_one(Account, 42)
        with pytest.raises(UnfencedWrite), session.begin_nested():
            withdraw(session)
        holds.grants = [claimed(bank, 7)]
        account.balance = 1
        session.commit()
    assert balance(bank, "account") == 1


def test_a_hold_that_ends_inside_a_transaction_is_announced_no_longer(attached: Engine, holds: Holds) -> None:
    with attached.begin() as connection:
        holds.grants = [SEVEN, OTHER]
        assert announced(connection) == told(SEVEN, OTHER)
        holds.grants = [OTHER]
        assert announced(connection) == told(OTHER)
        holds.grants = []
        assert announced(connection) == {}


@pytest.mark.case("case 33: a method that only mutates, flushed by the caller's commit", control="inside")
def test_a_change_made_under_the_hold_and_flushed_after_it_is_refused_as_unfenced(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    holds.grants = [claimed(bank, 7)]
    with Session(attached) as session:
        session.get_one(Account, 42).balance = 1
        holds.grants = []
        with pytest.raises(UnfencedWrite) as caught:
            session.commit()
    with Session(attached) as control:
        control.get_one(Plain, 42).balance = 1
        control.commit()
    assert caught.value.table == "public.account"
    assert (balance(bank, "account"), balance(bank, "plain")) == (100, 1)


def test_core_on_the_engine_announces(attached: Engine, holds: Holds, bank: Bank) -> None:
    holds.grants = [claimed(bank, 7)]
    with attached.begin() as connection:
        withdraw(connection)
    assert balance(bank, "account") == 1


def test_the_connection_of_a_session_announces(attached: Engine, holds: Holds, bank: Bank) -> None:
    holds.grants = [claimed(bank, 7)]
    with Session(attached) as session, session.begin():
        withdraw(session.connection())
    assert balance(bank, "account") == 1


def test_a_statement_of_the_driver_s_own_announces(attached: Engine, holds: Holds, bank: Bank) -> None:
    holds.grants = [claimed(bank, 7)]
    with attached.begin() as connection:
        connection.exec_driver_sql("update account set balance = 1 where id = 42")
    assert balance(bank, "account") == 1


def test_an_announcement_in_a_savepoint_that_was_rolled_back_is_made_again(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    with Session(attached) as session, session.begin():
        announced(session)
        savepoint = session.begin_nested()
        holds.grants = [claimed(bank, 7)]
        assert announced(session) == told(*holds.grants)
        savepoint.rollback()
        assert announced(session) == told(*holds.grants)
        withdraw(session)
    assert balance(bank, "account") == 1


def test_a_savepoint_rolled_back_in_plain_sql_makes_it_announce_again(attached: Engine, holds: Holds) -> None:
    with attached.begin() as connection:
        connection.exec_driver_sql("savepoint here")
        holds.grants = [SEVEN]
        assert announced(connection) == told(SEVEN)
        connection.exec_driver_sql("rollback to savepoint here")
        assert announced(connection) == told(SEVEN)


def test_what_a_savepoint_revived_is_taken_back(attached: Engine, holds: Holds) -> None:
    holds.grants = [SEVEN]
    with attached.begin() as connection:
        assert announced(connection) == told(SEVEN)
        savepoint = connection.begin_nested()
        holds.grants = []
        assert announced(connection) == {}
        savepoint.rollback()
        assert announced(connection) == {}


def test_a_transaction_ended_in_plain_sql_is_announced_anew_or_refused(attached: Engine, holds: Holds) -> None:
    holds.grants = [SEVEN]
    with attached.begin() as connection:
        assert announced(connection) == told(SEVEN)
        connection.exec_driver_sql("commit")
        if attached.dialect.driver == "asyncpg":
            # The adapter would not begin again, so that nothing could be announced.
            with pytest.raises(ValueError, match="ended in SQL"):
                announced(connection)
        else:
            assert announced(connection) == told(SEVEN)


def test_an_aborted_transaction_can_be_rolled_back_to_its_savepoint(attached: Engine, holds: Holds) -> None:
    with attached.begin() as connection:
        savepoint = connection.begin_nested()
        with pytest.raises(Exception, match="division"):
            connection.execute(text("select 1 / 0"))
        holds.grants = [SEVEN]
        savepoint.rollback()
        assert announced(connection) == told(SEVEN)


def test_in_an_aborted_transaction_a_changed_context_is_reported_as_aborted(attached: Engine, holds: Holds) -> None:
    with attached.connect() as connection:
        with pytest.raises(DBAPIError, match="division"):
            connection.execute(text("select 1 / 0"))
        holds.grants = [SEVEN]
        with pytest.raises(DBAPIError) as caught:
            connection.execute(text("select 1"))
        connection.rollback()
        assert announced(connection) == told(SEVEN)
    assert caught.value.orig.sqlstate == "25P02"  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["create_savepoint", "rollback_only", "control_fully", "conditional_savepoint"])
def test_a_session_joined_to_an_outer_transaction_announces(
    attached: Engine, holds: Holds, bank: Bank, mode: Any
) -> None:
    with attached.connect() as connection, connection.begin():
        announced(connection)
        holds.grants = [claimed(bank, 7)]
        with Session(connection, join_transaction_mode=mode) as session:
            withdraw(session)
            session.commit()
        holds.grants = []
        if mode != "control_fully":
            assert announced(connection) == {}
            connection.commit()
    assert balance(bank, "account") == 1


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_next_transaction_of_a_pooled_connection_starts_without_an_announcement(
    attached: Engine, holds: Holds, end: str
) -> None:
    holds.grants = [SEVEN]
    with attached.connect() as connection:
        pid = connection.scalar(text("select pg_backend_pid()"))
        getattr(connection, end)()
    holds.grants = []
    with attached.connect() as connection:
        assert connection.scalar(text("select pg_backend_pid()")) == pid
        assert announced(connection) == {}


def test_a_pooled_connection_used_without_sqlalchemy_starts_without_an_announcement(
    attached: Engine, holds: Holds
) -> None:
    holds.grants = [SEVEN]
    with attached.connect() as connection, pytest.raises(Exception, match="division"):
        connection.execute(text("select 1 / 0"))
    driver = attached.raw_connection()
    cursor = driver.cursor()
    cursor.execute("select current_setting('fenceguard.grants', true)")
    assert cursor.fetchone()[0] in {"", None}
    cursor.close()
    driver.close()


def test_a_lease_lost_at_begin_stops_the_transaction_and_the_connection_stays_usable(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    holds.lost = LeaseLost(KEY, "suspended")
    with attached.connect() as connection:
        with pytest.raises(LeaseLost):
            connection.begin()
        with pytest.raises(LeaseLost):
            withdraw(connection)
        holds.lost, holds.grants = None, [claimed(bank, 7)]
        withdraw(connection)
        assert connection.in_transaction()
        connection.commit()
        connection.commit()
    assert balance(bank, "account") == 1


def test_a_session_whose_lease_is_lost_at_begin_can_begin_again(attached: Engine, holds: Holds, bank: Bank) -> None:
    with Session(attached) as session:
        holds.lost = LeaseLost(KEY, "suspended")
        with pytest.raises(LeaseLost):
            withdraw(session)
        holds.lost, holds.grants = None, [claimed(bank, 7)]
        withdraw(session)
        session.commit()
    assert balance(bank, "account") == 1


def test_trust_is_looked_at_once_for_each_transaction(attached: Engine, holds: Holds) -> None:
    with Session(attached) as session:
        for _ in range(2):
            session.execute(text("select 1"))
            session.execute(text("select 2"))
            session.commit()
    assert holds.begun == 2


def test_two_sources_on_one_engine_are_announced_together(any_engine: Engine, holds: Holds) -> None:
    second = Holds(grants=[OTHER])
    holds.grants = [SEVEN]
    for source in (holds, second, holds):
        attach(any_engine, source)
    with any_engine.begin() as connection:
        assert announced(connection) == told(SEVEN, OTHER)
    assert (holds.begun, second.begun) == (1, 1)


def test_of_two_tokens_for_one_resource_the_smaller_is_announced(any_engine: Engine, holds: Holds) -> None:
    holds.grants = [Claim(KEY, 8, "b")]
    attach(any_engine, holds)
    attach(any_engine, Holds(grants=[SEVEN]))
    with any_engine.begin() as connection:
        assert announced(connection) == told(SEVEN)


@pytest.mark.parametrize("attached_first", ["variant", "engine"])
def test_an_engine_and_its_variants_of_other_options_announce_alike(
    any_engine: Engine, holds: Holds, attached_first: str
) -> None:
    variant = any_engine.execution_options(isolation_level="SERIALIZABLE")
    engines = [variant, any_engine] if attached_first == "variant" else [any_engine, variant]
    for engine in engines:
        attach(engine, holds)
    holds.grants = [SEVEN]
    for engine in engines:
        with engine.begin() as connection:
            assert announced(connection) == told(SEVEN)


def test_an_engine_that_is_not_attached_announces_nothing(any_engine: Engine, holds: Holds) -> None:
    attach(any_engine.execution_options(), Holds())
    holds.grants = [SEVEN]
    with any_engine.begin() as connection:
        assert announced(connection) == {}


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_hold_is_announced_and_enters_at_every_isolation_level(
    attached: Engine, holds: Holds, bank: Bank, level: Any
) -> None:
    holds.grants = [claimed(bank, 7)]
    with attached.connect().execution_options(isolation_level=level) as connection:
        assert connection.scalar(text("show transaction_isolation")) == level.lower()
        withdraw(connection)
        connection.commit()
    assert balance(bank, "account") == 1


def test_the_isolation_level_can_still_be_set_in_the_transaction(attached: Engine, holds: Holds) -> None:
    holds.grants = [SEVEN]
    with attached.begin() as connection:
        connection.exec_driver_sql("set transaction isolation level serializable")
        assert connection.scalar(text("show transaction_isolation")) == "serializable"
        assert announced(connection) == told(SEVEN)


def test_a_read_only_and_deferrable_transaction_stays_so(attached: Engine, holds: Holds) -> None:
    holds.grants = [SEVEN]
    options: dict[str, Any] = {
        "isolation_level": "SERIALIZABLE",
        "postgresql_readonly": True,
        "postgresql_deferrable": True,
    }
    with attached.connect().execution_options(**options) as connection:
        assert announced(connection) == told(SEVEN)
        settings = ("transaction_isolation", "transaction_read_only", "transaction_deferrable")
        assert [connection.scalar(text(f"show {name}")) for name in settings] == ["serializable", "on", "on"]


def advisory_locks(bank: Bank) -> int:
    found = bank.execute(
        "select count(*) from pg_locks l join pg_database d on d.oid = l.database "
        "where locktype = 'advisory' and datname = current_database()"
    ).fetchone()
    return found[0]  # type: ignore[index]


def test_a_transaction_that_only_reads_under_a_hold_locks_nothing(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    holds.grants = [claimed(bank, 7)]
    with Session(attached) as session:
        session.get_one(Account, 42)
        reading = advisory_locks(bank)
        withdraw(session)
        writing = advisory_locks(bank)
    assert (reading, writing) == (0, 1)


@pytest.mark.parametrize(
    "name", [r"it's", r"\u0041\n\\", "100%s %(x)s %%", ":name", "𝄞 ünï", '"}{"', "E'x'", "$1", "?"]
)
@pytest.mark.parametrize("strings", ["on", "off"])
def test_every_name_is_announced_as_it_is(
    attached: Engine, holds: Holds, bank: Bank, name: str, strings: str
) -> None:
    holds.grants = [claimed(bank, 7, name, owner=name), SEVEN]
    claimed(bank, 7)
    with attached.connect() as connection:
        connection.exec_driver_sql(f"set standard_conforming_strings = {strings}")
        connection.commit()
        assert announced(connection) == told(*holds.grants)
        connection.execute(text("select fenceguard.enter_announced()"))
        holds.grants = [holds.grants[0]]
        assert announced(connection) == told(*holds.grants)


def test_a_prepared_transaction_has_announced_what_it_wrote_under(
    attached: Engine, holds: Holds, bank: Bank
) -> None:
    holds.grants = [claimed(bank, 7)]
    with attached.connect() as connection:
        transaction = connection.begin_twophase("fence-test")
        withdraw(connection)
        transaction.prepare()
        transaction.commit()
    assert balance(bank, "account") == 1


def test_an_announcement_whose_statement_was_never_sent_is_not_made_when_the_context_has_changed(
    attached: Engine, holds: Holds
) -> None:
    def veto(*_: Any) -> None:
        event.remove(attached, "before_cursor_execute", veto)
        raise LookupError

    with attached.connect() as connection:
        holds.grants = [SEVEN]
        event.listen(attached, "before_cursor_execute", veto)
        with pytest.raises(LookupError):
            connection.execute(text("select 1"))
        holds.grants = []
        assert announced(connection) == {}


def test_a_source_is_told_of_a_transaction_before_each_statement_that_it_announces(
    attached: Engine, holds: Holds
) -> None:
    with attached.begin() as connection:
        connection.execute(text("select 1"))
        unannounced = len(holds.transactions)
        holds.grants = [SEVEN]
        connection.execute(text("select 1"))
        connection.execute(text("select 1"))
    with attached.begin() as connection:
        connection.execute(text("select 1"))
        told = list(holds.transactions)
        open_ = [not transaction.over for transaction in told]
    first, again, other = told
    assert unannounced == 0
    assert first is again
    assert other is not first
    assert open_ == [False, False, True]
    assert other.over
