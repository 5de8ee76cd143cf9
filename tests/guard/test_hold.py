"""`Guard.hold` on real servers: what a holder may do, and what happens when memories are lost."""

from __future__ import annotations

import contextvars
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import Engine, create_engine, text, update
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker
from support.bank import KEY, Account, Plain, balance
from support.guarded import keys, lease_key
from support.sql import Connection, scalar, sqlstate
from support.urls import driver

from fenceguard import (
    ClaimTimeout,
    Guard,
    LeaseClient,
    LeaseLost,
    LeaseUnavailable,
    OpenTransaction,
    StaleToken,
    UnfencedWrite,
)
from fenceguard.events import Claimed, Event, ExpiredLate, Lifted, Lost, Outlived, Refused, Released
from fenceguard.fence import claim

MakeGuard = Callable[..., Guard]


@contextmanager
def held_elsewhere(guard: Guard) -> Iterator[contextvars.Context]:
    """Hold the account in a context of its own, as another thread or process would."""
    context, stack = contextvars.Context(), ExitStack()
    context.run(stack.enter_context, guard.hold(KEY))
    try:
        yield context
    finally:
        context.run(stack.close)


def set_balance(guard: Guard, value: int) -> None:
    with guard.sessions().begin() as session:
        session.execute(update(Account).where(Account.id == 42).values(balance=value))


def test_a_holder_writes_under_its_token_and_gives_the_lease_back(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    guard = make_guard()
    with guard.hold(KEY) as held, guard.sessions().begin() as session:
        assert guard.current() is held
        assert held.remaining() > 0
        session.get_one(Account, 42).balance = 7
    assert balance(bank, "account") == 7
    assert bank.execute("select fence from account where id = 42").fetchone() == (held.token,)
    assert redis_client.exists(lease_key(prefix)) == 0
    with pytest.raises(LookupError):
        guard.current()


@pytest.mark.case(
    "case 18: waiting for the lease times out, the body does not run", control="none: no body, no write"
)
def test_a_held_resource_is_unavailable_to_another_guard_and_its_body_does_not_run(
    make_guard: MakeGuard, bank: Connection
) -> None:
    first, second = make_guard(owner="first"), make_guard()
    ran = False
    with first.hold(KEY), pytest.raises(LeaseUnavailable) as caught, second.hold(KEY, wait=0.1):
        ran = True
    assert not ran
    assert caught.value.owner.startswith("first")
    assert 0 < caught.value.retry_after <= 10.0


def test_a_write_without_a_hold_is_refused_on_the_enforced_table_and_lands_on_the_control(
    make_guard: MakeGuard, bank: Connection
) -> None:
    sessions = make_guard().sessions()
    with sessions.begin() as session:
        session.execute(update(Plain).values(balance=0))
    with pytest.raises(UnfencedWrite), sessions.begin() as session:
        session.execute(update(Account).values(balance=0))
    assert balance(bank, "plain") == 0
    assert balance(bank, "account") == 100


def test_a_call_inside_a_call_on_the_same_resource_joins_it(make_guard: MakeGuard, bank: Connection) -> None:
    guard = make_guard()
    with guard.hold(KEY) as outer:
        with guard.hold(KEY) as inner:
            assert inner is outer
        inner.confirm()
        with guard.hold("account:43") as other, guard.sessions().begin() as session:
            session.execute(update(Account).where(Account.id.in_([42, 43])).values(balance=5))
    assert bank.execute("select fence from account where id in (42, 43) order by id").fetchall() == [
        (outer.token,),
        (other.token,),
    ]


def test_a_session_given_a_grant_writes_under_it_outside_the_context(
    make_guard: MakeGuard, bank: Connection
) -> None:
    guard = make_guard()
    with guard.hold(KEY) as held:
        failed: list[BaseException] = []

        def elsewhere() -> None:
            try:
                with guard.sessions()(grant=held.grant) as session, session.begin():
                    session.execute(update(Account).where(Account.id == 42).values(balance=9))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=elsewhere)  # starts with an empty context
        thread.start()
        thread.join()
    assert failed == []
    assert balance(bank, "account") == 9


def test_an_attached_sessionmaker_announces_the_context(
    make_guard: MakeGuard, bank: Connection, database_url: str
) -> None:
    own = create_engine(driver(database_url, "psycopg"))
    guard, factory = make_guard(), sessionmaker(own)
    guard.attach(factory)
    with guard.hold(KEY), factory.begin() as session:
        session.execute(update(Account).where(Account.id == 42).values(balance=3))
    own.dispose()
    assert balance(bank, "account") == 3


def test_the_session_named_is_flushed_before_the_hold_ends(make_guard: MakeGuard, bank: Connection) -> None:
    guard = make_guard()
    with guard.sessions().begin() as session:
        account = session.get_one(Account, 42)
        with guard.hold(KEY, session=session):
            account.balance = 8
        assert not session.dirty
    assert balance(bank, "account") == 8


@pytest.mark.case("case 27: the counter restarts at 1 below a fence at 7", control="inside")
def test_a_counter_that_restarts_at_1_below_a_fence_at_7_is_lifted_and_the_holder_works_under_8(
    make_guard: MakeGuard, bank: Connection
) -> None:
    bank.execute("select fenceguard.claim(%s, 7, 'somebody-before')", (KEY,))
    # The control: without the lift the next holder is locked out.
    assert sqlstate(bank, "select fenceguard.claim(%s, 1, 'the-next')", KEY) == "ZF001"
    events: list[Event] = []
    guard = make_guard(listener=events.append)
    with guard.hold(KEY) as held, guard.sessions().begin() as session:
        session.get_one(Account, 42).balance = 1
    assert held.token == 8
    assert balance(bank, "account") == 1
    assert [type(event) for event in events if isinstance(event, Lifted | Claimed)] == [Lifted, Claimed]


@pytest.mark.case(
    "case 28: Redis is flushed between two holders, whose tokens are equal",
    control="test_control_of_two_equal_tokens_a_comparison_of_rows_admits_both",
)
def test_of_two_holders_with_equal_tokens_after_a_flush_only_the_newer_one_writes(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    events: list[Event] = []
    first, second = make_guard(listener=events.append), make_guard()
    with first.hold(KEY) as old:
        session = first.sessions()()
        session.execute(update(Plain).where(Plain.id == 42).values(balance=50))
        redis_client.delete(*keys(prefix))  # as after FLUSHALL
        with held_elsewhere(second) as elsewhere:
            elsewhere.run(set_balance, second, 200)
            new = elsewhere.run(second.current)
        with pytest.raises(StaleToken) as caught:
            session.execute(update(Account).where(Account.id == 42).values(balance=50))
        session.rollback()
        session.close()
        assert (old.token, new.token) == (1, 2)
        assert (caught.value.token, caught.value.newest) == (1, 2)
        assert getattr(caught.value.__cause__, "sqlstate", None) == "ZF001"
    assert balance(bank, "account") == 200
    assert [type(event) for event in events if isinstance(event, Refused)] == [Refused]


def test_control_of_two_equal_tokens_a_comparison_of_rows_admits_both(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    bank.execute("alter table plain add column fence bigint not null default 0")
    conditional_update = "update plain set balance = %s, fence = %s where id = 42 and fence <= %s"
    with LeaseClient(redis_client, prefix=prefix) as client:
        old = client.acquire(KEY, wait=0.0)
        redis_client.delete(*keys(prefix))
        new = client.acquire(KEY, wait=0.0)
    for grant, value in ((new, 200), (old, 50)):
        bank.execute(conditional_update, (value, grant.token, grant.token))
    assert new.token == old.token
    assert balance(bank, "plain") == 50  # the stale write


def test_a_holder_pushed_out_by_a_dead_holders_late_claim_claims_anew_and_goes_on(
    make_guard: MakeGuard, bank: Connection
) -> None:
    guard = make_guard()
    with guard.hold(KEY) as held:
        before = held.token
        bank.execute("select fenceguard.claim(%s, %s, 'a dead one')", (KEY, before + 5))
        with pytest.raises(StaleToken):
            set_balance(guard, 1)
        set_balance(guard, 2)
        assert held.token == before + 6
    assert balance(bank, "account") == 2


def test_a_holder_whose_lease_was_taken_over_loses_it_when_postgres_refuses_its_write(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    first, second = make_guard(), make_guard()
    with first.hold(KEY) as old:
        redis_client.delete(lease_key(prefix))
        with held_elsewhere(second):
            with pytest.raises(StaleToken):
                set_balance(first, 1)
            with pytest.raises(LeaseLost) as caught, first.sessions().begin() as session:
                session.connection()
            assert caught.value.reason == "taken_over"
            with pytest.raises(LeaseLost):
                old.confirm()
    assert balance(bank, "account") == 100


def test_an_open_transaction_of_the_holder_before_keeps_the_claim_waiting_and_is_named(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    first, second = make_guard(), make_guard(claim_wait=0.2)
    with first.hold(KEY) as old:
        session = first.sessions()()
        session.execute(update(Account).where(Account.id == 42).values(balance=1))
        pid = session.connection().connection.dbapi_connection.info.backend_pid
        redis_client.delete(lease_key(prefix))
        with pytest.raises(ClaimTimeout) as caught, second.hold(KEY):
            pass
        assert str(pid) in str(caught.value)
        assert redis_client.exists(lease_key(prefix)) == 0
        session.commit()
        session.close()
        assert old.token == 1
    assert balance(bank, "account") == 1


@pytest.mark.case(
    "case 41: five requests, pool of five, each holding a session while it claims",
    control="test_control_five_callers_who_claim_on_the_pool_that_they_have_used_up_wait_in_vain",
)
def test_five_callers_who_each_hold_one_of_the_pools_five_connections_can_all_claim(
    make_guard: MakeGuard, bank: Connection, database_url: str
) -> None:
    small = create_engine(driver(database_url, "psycopg"), pool_size=5, max_overflow=0, pool_timeout=5)
    guard = make_guard(engine=small)
    everybody = threading.Barrier(5, timeout=20)
    failed: list[BaseException] = []

    def work(account: int) -> None:
        try:
            with guard.sessions().begin() as session:
                row = session.get_one(Account, account)
                everybody.wait()
                with guard.hold(f"account:{account}", session=session):
                    row.balance = account
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(account,)) for account in range(40, 45)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    small.dispose()
    assert failed == []
    assert bank.execute("select balance from account order by id").fetchall() == [(n,) for n in range(40, 45)]


def test_control_five_callers_who_claim_on_the_pool_that_they_have_used_up_wait_in_vain(
    bank: Connection, database_url: str
) -> None:
    small = create_engine(driver(database_url, "psycopg"), pool_size=5, max_overflow=0, pool_timeout=0.5)
    everybody = threading.Barrier(5, timeout=20)
    failed: list[BaseException] = []

    def work(account: int) -> None:
        with small.connect():
            everybody.wait()
            try:
                with small.connect().execution_options(isolation_level="AUTOCOMMIT") as own:
                    claim(own, f"account:{account}", 1, f"caller {account}")
            except BaseException as error:
                failed.append(error)
            everybody.wait()

    threads = [threading.Thread(target=work, args=(account,)) for account in range(40, 45)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    small.dispose()
    assert [type(error) for error in failed] == [PoolTimeout] * 5
    assert scalar(bank, "select count(*) from fenceguard.fence") == 0


def test_a_transaction_begun_by_a_thread_that_outlives_the_hold_is_refused(
    make_guard: MakeGuard, bank: Connection
) -> None:
    guard = make_guard()
    with guard.hold(KEY):
        context = contextvars.copy_context()
    with pytest.raises(LeaseLost) as caught:
        context.run(lambda: guard.sessions()().execute(update(Account).values(balance=0)))
    assert caught.value.reason == "released"
    assert balance(bank, "account") == 100


@pytest.mark.case("case 30: fork then exit", control="none: a second copy of a trusted lease is the damage")
def test_a_forked_child_does_not_hold_its_parents_lease_and_its_exit_leaves_it_alone(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    guard = make_guard()
    with guard.hold(KEY) as held:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                held.confirm()
                os.write(writing, b"trusted")
            except LeaseLost as lost:
                os.write(writing, lost.reason.encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            reason = pipe.read()
        os.waitpid(child, 0)
        held.confirm()
        assert redis_client.exists(lease_key(prefix)) == 1
    assert reason == b"forked"


def test_trust_that_ended_after_the_last_commit_is_noted_and_the_result_stands(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    events: list[Event] = []
    told = threading.Event()

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, Lost):
            told.set()

    guard = make_guard(ttl=0.5, listener=listen)
    with guard.hold(KEY):
        set_balance(guard, 4)
        redis_client.delete(lease_key(prefix))
        assert told.wait(5)
    assert balance(bank, "account") == 4
    assert [type(event) for event in events if isinstance(event, Lost | ExpiredLate)] == [Lost, ExpiredLate]


def test_errors_of_a_hold_pickle(make_guard: MakeGuard, bank: Connection) -> None:
    guard = make_guard()
    with guard.hold(KEY) as held:
        bank.execute("select fenceguard.claim(%s, %s, 'newer')", (KEY, held.token + 1))
        with pytest.raises(StaleToken) as caught:
            set_balance(guard, 1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.resource, copy.token, copy.newest, copy.table, copy.key) == (KEY, 1, 2, "public.account", None)
    assert str(copy) == str(caught.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"ttl": 0.05}, "ttl"),
        ({"renew_every": 9.0}, "renew_every"),
        ({"safety": 9.0}, "safety"),
        ({"claim_wait": -1.0}, "claim_wait"),
        ({"max_hold": 1.0}, "max_hold"),
        ({"carrier": "task"}, "carrier"),
        ({"prefix": "a{b}"}, "prefix"),
        ({"owner": "a\nb"}, "owner"),
    ],
)
def test_a_setting_that_breaks_its_rule_is_named_when_the_guard_is_made(
    make_guard: MakeGuard, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        make_guard(**options)


def test_a_guard_that_is_not_bound_says_so() -> None:
    guard = Guard()
    with pytest.raises(ValueError, match="bind"), guard.hold(KEY):
        pass


def test_a_guard_is_bound_once(make_guard: MakeGuard, redis_client: Redis, engine: Engine) -> None:
    guard = make_guard()
    with pytest.raises(ValueError, match="bound already"):
        guard.bind(redis_client, engine)


@pytest.mark.parametrize("resource", ["", "a\x00b", "x" * 513])
def test_a_resource_that_is_no_valid_name_is_refused_before_anything_is_done(
    make_guard: MakeGuard, resource: str
) -> None:
    with pytest.raises(ValueError, match="resource"), make_guard().hold(resource):
        pass


def test_two_guards_in_one_process_do_not_disturb_each_other(
    make_guard: MakeGuard, bank: Connection, prefix: str
) -> None:
    one, other = make_guard(), make_guard(prefix=f"{prefix}-other")
    with one.hold(KEY) as held:
        with pytest.raises(LookupError):
            other.current()
        assert one.current() is held


# -- a hold that ends while a transaction that wrote under it is open (part 5 of the protocol)


@pytest.mark.case(
    "case 34: two decorated calls on one resource in one caller's transaction",
    control="none: the second would wait for the first",
)
def test_a_second_call_in_the_callers_transaction_joins_instead_of_waiting_for_it(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    guard = make_guard()

    @guard.fenced("account:{account_id}")
    def withdraw(session: Session, account_id: int, amount: int) -> int:
        session.execute(update(Account).where(Account.id == account_id).values(balance=Account.balance - amount))
        return guard.current().token

    with guard.sessions().begin() as session:
        tokens = {withdraw(session, 42, 10), withdraw(session, 42, 10)}
        assert redis_client.exists(lease_key(prefix)) == 1  # kept for the open transaction
    guard.close()
    assert len(tokens) == 1
    assert redis_client.exists(lease_key(prefix)) == 0
    assert balance(bank, "account") == 80


def test_a_lease_kept_for_a_transaction_is_given_back_when_that_ends(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    released = threading.Event()
    guard = make_guard(listener=lambda event: released.set() if isinstance(event, Released) else None)
    session = guard.sessions()()
    with guard.hold(KEY):
        session.execute(update(Account).where(Account.id == 42).values(balance=1))
    assert not released.is_set()
    session.rollback()
    assert released.wait(5)
    session.close()
    assert redis_client.exists(lease_key(prefix)) == 0


def test_a_transaction_that_only_read_under_a_hold_does_not_keep_its_lease(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    guard = make_guard()
    with guard.sessions()() as session:
        with guard.hold(KEY):
            assert session.get_one(Account, 42).balance == 100
        assert redis_client.exists(lease_key(prefix)) == 0


def test_a_transaction_that_outlives_its_hold_by_a_ttl_is_noted_and_named_to_the_next_hold(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    outlived = threading.Event()
    guard = make_guard(ttl=0.3, listener=lambda event: outlived.set() if isinstance(event, Outlived) else None)
    with guard.sessions()() as session:
        with guard.hold(KEY):
            session.execute(update(Account).where(Account.id == 42).values(balance=1))
        assert outlived.wait(5)
        with pytest.raises(OpenTransaction) as caught, guard.hold(KEY, wait=5.0):
            pass
        session.commit()
        with guard.hold(KEY, wait=5.0) as held:
            assert held.token == 2
    assert caught.value.resource == KEY
    assert balance(bank, "account") == 1


def test_a_call_that_writes_by_a_function_joins_as_well(make_guard: MakeGuard, bank: Connection) -> None:
    bank.execute(
        "create function deposit(p bigint) returns void language sql as "
        "'update account set balance = balance + p where id = 42'"
    )
    guard = make_guard(claim_wait=0.5)
    with guard.sessions().begin() as session:
        for _ in range(2):
            with guard.hold(KEY):
                session.execute(text("select deposit(1)"))
    assert balance(bank, "account") == 102


def test_many_calls_in_one_transaction_have_one_keeper(make_guard: MakeGuard, bank: Connection) -> None:
    guard = make_guard()
    with guard.sessions().begin() as session:
        for _ in range(20):
            with guard.hold(KEY):
                session.execute(update(Account).where(Account.id == 42).values(balance=1))
        keepers = [thread for thread in threading.enumerate() if thread.name == "fenceguard-keep"]
    assert len(keepers) == 1


def test_a_listener_that_fails_costs_neither_the_hold_nor_its_end(
    make_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise RuntimeError(type(event).__name__)

    with make_guard(listener=fail).hold(KEY) as held:
        held.confirm()
    assert redis_client.exists(keys(prefix)[0]) == 0
    assert "the listener failed on Claimed" in caplog.text


def test_a_long_hold_forgets_the_transactions_that_have_ended(make_guard: MakeGuard, bank: Connection) -> None:
    guard = make_guard()
    with guard.hold(KEY) as held:
        for value in range(10):
            set_balance(guard, value)
        assert len(held._hold._transactions) <= 1
