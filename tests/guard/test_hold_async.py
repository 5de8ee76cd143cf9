"""`AsyncGuard.hold` on real servers: the same promise, and how the loss of a lease reaches work that awaits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from sqlalchemy import create_engine, text, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import sessionmaker
from support.bank import KEY, Account, Plain, balance
from support.guarded import lease_key
from support.sql import Connection
from support.urls import driver

from fenceguard import AsyncGuard, AsyncLeaseClient, Guard, LeaseLost, LeaseUnavailable, StaleToken
from fenceguard.events import Claimed, Event, ExpiredLate, Lost, Released

MakeGuard = Callable[..., AsyncGuard]

both_carriers = pytest.mark.parametrize("carrier", ["task", "thread"])


async def write(guard: AsyncGuard, value: int) -> None:
    async with guard.sessions().begin() as session:
        (await session.get_one(Account, 42)).balance = value


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


@both_carriers
async def test_a_holder_writes_under_its_token_and_gives_the_lease_back(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str, carrier: str
) -> None:
    guard = make_async_guard(carrier=carrier)
    async with guard.hold(KEY) as held:
        assert guard.current() is held
        await write(guard, 7)
    assert balance(bank, "account") == 7
    assert bank.execute("select fence from account where id = 42").fetchone() == (held.token,)
    assert redis_client.exists(lease_key(prefix)) == 0


async def test_a_held_resource_is_unavailable_and_the_body_does_not_run(
    make_async_guard: MakeGuard, bank: Connection
) -> None:
    first, second = make_async_guard(), make_async_guard()
    ran = False
    async with first.hold(KEY):
        with pytest.raises(LeaseUnavailable):
            async with second.hold(KEY, wait=0.1):
                ran = True
    assert not ran


async def test_a_waiting_holder_follows_when_the_first_one_releases(
    make_async_guard: MakeGuard, bank: Connection
) -> None:
    first, second = make_async_guard(), make_async_guard()
    async with first.hold(KEY) as old:
        follower = asyncio.create_task(_token_of(second, wait=10.0))
        await asyncio.sleep(0)
    assert await follower == old.token + 1


async def _token_of(guard: AsyncGuard, *, wait: float) -> int:
    async with guard.hold(KEY, wait=wait) as held:
        return held.token


@pytest.mark.case("a 1.5 s lease held through 3 s of work", control="inside")
@both_carriers
async def test_a_lease_of_one_and_a_half_seconds_is_held_through_three_seconds_of_work(
    make_async_guard: MakeGuard, bank: Connection, async_redis: AsyncRedis, prefix: str, carrier: str
) -> None:
    guard, other = make_async_guard(ttl=1.5, carrier=carrier), make_async_guard(ttl=1.5)
    leases = AsyncLeaseClient(async_redis, ttl=1.5, prefix=prefix)
    began = monotonic()
    async with guard.hold(KEY) as held:
        # The control: a lease as short that nobody renews is another owner's before the work is done.
        unrenewed = await leases.acquire("account:43", wait=0.0)
        taking = asyncio.create_task(leases.acquire("account:43", wait=3.0))
        async with guard.sessions().begin() as session:
            await session.execute(text("select pg_sleep(3)"))  # the work
            with pytest.raises(LeaseUnavailable):
                async with other.hold(KEY):
                    pass
            await session.execute(update(Account).where(Account.id == 42).values(balance=3))
        held.confirm()
    assert monotonic() - began >= 3
    assert (await taking).token == unrenewed.token + 1
    assert balance(bank, "account") == 3


@pytest.mark.case("a takeover is noticed within one renew_every", control="none: the fence is another test's")
@both_carriers
async def test_a_takeover_is_noticed_within_one_renewal_and_leaves_the_hold_as_lease_lost(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str, carrier: str
) -> None:
    guard = make_async_guard(ttl=1.5, carrier=carrier)
    with pytest.raises(LeaseLost) as caught:
        async with guard.hold(KEY):
            redis_client.set(lease_key(prefix), "99 somebody-else", px=60_000)
            taken_over_at = monotonic()
            await for_ever()
    assert monotonic() - taken_over_at < 0.5 + 0.2  # renew_every, and the machine's noise
    assert caught.value.reason == "taken_over"
    assert redis_client.get(lease_key(prefix)) == b"99 somebody-else"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_the_loss_leaves_a_task_group_as_itself_and_not_as_a_group(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    guard = make_async_guard(ttl=0.6)
    with pytest.raises(LeaseLost):
        async with guard.hold(KEY), asyncio.TaskGroup() as group:
            group.create_task(for_ever())
            redis_client.delete(lease_key(prefix))


async def test_a_loss_met_at_begin_in_a_child_task_leaves_the_task_group_as_itself(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    guard = make_async_guard(ttl=0.6)

    async def write_after_the_loss() -> None:
        try:
            await for_ever()
        finally:
            await write(guard, 1)

    with pytest.raises(LeaseLost):
        async with guard.hold(KEY), asyncio.TaskGroup() as group:
            group.create_task(write_after_the_loss())
            redis_client.delete(lease_key(prefix))
    assert balance(bank, "account") == 100


async def test_a_cancellation_from_outside_stays_one(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    guard, inside = make_async_guard(), asyncio.Event()

    async def work() -> None:
        async with guard.hold(KEY):
            inside.set()
            await for_ever()

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert redis_client.exists(lease_key(prefix)) == 0


async def test_a_time_limit_around_the_hold_stays_a_time_limit(
    make_async_guard: MakeGuard, bank: Connection
) -> None:
    guard = make_async_guard()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), guard.hold(KEY):
            await for_ever()


async def test_a_loss_during_the_last_commit_does_not_cut_it(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    """A deferred constraint trigger holds the COMMIT up until the lease is lost."""
    bank.execute(
        "create function wait_at_commit() returns trigger language plpgsql as "
        "$$ begin perform pg_advisory_xact_lock(7); return null; end $$;"
        "create constraint trigger slow after update on account deferrable initially deferred "
        "for each row execute function wait_at_commit()"
    )
    lost = asyncio.Event()
    loop = asyncio.get_running_loop()

    def listen(event: Event) -> None:
        if isinstance(event, Lost):
            loop.call_soon_threadsafe(lost.set)

    guard = make_async_guard(ttl=0.6, listener=listen)

    async def let_it_commit() -> None:
        await lost.wait()
        bank.execute("select pg_advisory_unlock(7)")

    bank.execute("select pg_advisory_lock(7)")
    releaser = asyncio.create_task(let_it_commit())
    with pytest.raises(LeaseLost):  # at the await after the COMMIT
        async with guard.hold(KEY):
            redis_client.delete(lease_key(prefix))
            await write(guard, 6)
            await for_ever()
    await releaser
    assert balance(bank, "account") == 6


async def test_trust_that_ended_after_the_last_commit_is_noted_and_the_result_stands(
    make_async_guard: MakeGuard, bank: Connection
) -> None:
    events: list[Event] = []
    guard = make_async_guard(ttl=0.3, listener=events.append)

    @guard.fenced(KEY)
    async def work() -> str:
        await write(guard, 4)
        held = guard.current()
        while held.remaining() > 0:  # busy, so that neither heartbeat nor cancellation has its turn
            pass
        return "done"

    assert await work() == "done"
    assert balance(bank, "account") == 4
    assert [type(event) for event in events if isinstance(event, ExpiredLate)] == [ExpiredLate]


async def test_a_task_that_outlives_its_hold_cannot_begin_a_transaction(
    make_async_guard: MakeGuard, bank: Connection
) -> None:
    guard, go = make_async_guard(), asyncio.Event()

    async def later() -> None:
        await go.wait()
        await write(guard, 1)

    async with guard.hold(KEY):
        leaked = asyncio.create_task(later())
    go.set()
    with pytest.raises(LeaseLost) as caught:
        await leaked
    assert caught.value.reason == "released"
    assert balance(bank, "account") == 100


async def test_a_holder_pushed_out_by_a_dead_holders_late_claim_claims_anew_and_goes_on(
    make_async_guard: MakeGuard, bank: Connection
) -> None:
    guard = make_async_guard()
    async with guard.hold(KEY) as held:
        bank.execute("select fenceguard.claim(%s, 5, 'a dead one')", (KEY,))
        with pytest.raises(StaleToken) as caught:
            await write(guard, 1)
        await write(guard, 2)
        assert held.token == 6
    assert getattr(caught.value.__cause__, "sqlstate", None) == "ZF001"
    assert balance(bank, "account") == 2


async def test_five_callers_who_each_hold_one_of_the_pools_five_connections_can_all_claim(
    make_async_guard: MakeGuard, bank: Connection, database_url: str
) -> None:
    small = create_async_engine(driver(database_url, "asyncpg"), pool_size=5, max_overflow=0, pool_timeout=5)
    guard = make_async_guard(engine=small)
    everybody = asyncio.Barrier(5)

    async def work(account: int) -> None:
        async with guard.sessions().begin() as session:
            row = await session.get_one(Account, account)
            await everybody.wait()
            async with guard.hold(f"account:{account}", session=session):
                row.balance = account

    async with asyncio.timeout(20):
        await asyncio.gather(*(work(account) for account in range(40, 45)))
    await small.dispose()
    assert bank.execute("select balance from account order by id").fetchall() == [(n,) for n in range(40, 45)]


@pytest.mark.case(
    "work in a thread that begins a transaction after the loss",
    control="test_control_work_in_a_thread_lands_without_the_fence",
)
async def test_work_in_a_thread_that_begins_after_the_loss_is_refused(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str, database_url: str
) -> None:
    guard = make_async_guard(ttl=0.6)
    own = create_engine(driver(database_url, "psycopg"))
    factory = sessionmaker(own)
    guard.attach(factory)
    outcome: list[BaseException] = []
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        try:
            with factory.begin() as session:
                session.execute(update(Account).where(Account.id == 42).values(balance=1))
        except BaseException as error:
            outcome.append(error)
        finally:
            done.set()

    with pytest.raises(LeaseLost):
        async with guard.hold(KEY):
            redis_client.delete(lease_key(prefix))
            await asyncio.to_thread(work)
    go.set()
    done.wait()
    own.dispose()
    assert [type(error) for error in outcome] == [LeaseLost]
    assert balance(bank, "account") == 100


@pytest.mark.case(
    "work in a thread that writes after the takeover's claim",
    control="test_control_work_in_a_thread_lands_without_the_fence",
)
async def test_work_in_a_thread_that_writes_after_the_takeovers_claim_is_refused_by_postgres(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str, database_url: str
) -> None:
    guard, successor = make_async_guard(ttl=0.6), make_async_guard()
    own = create_engine(driver(database_url, "psycopg"))
    factory = sessionmaker(own)
    guard.attach(factory)
    outcome: list[BaseException] = []
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        try:
            with factory.begin() as session:
                session.execute(text("select 1"))
                begun.set()
                go.wait()
                session.execute(update(Account).where(Account.id == 42).values(balance=1))
        except BaseException as error:
            outcome.append(error)
        finally:
            done.set()

    async def take_over() -> None:
        await asyncio.to_thread(begun.wait)
        redis_client.delete(lease_key(prefix))

    taking = asyncio.create_task(take_over())
    with pytest.raises(LeaseLost):
        async with guard.hold(KEY):
            await asyncio.to_thread(work)
    await taking
    async with successor.hold(KEY):
        go.set()
        await asyncio.to_thread(done.wait)
    own.dispose()
    assert [type(error) for error in outcome] == [StaleToken]
    assert getattr(outcome[0].__cause__, "sqlstate", None) == "ZF001"
    assert balance(bank, "account") == 100


async def test_control_work_in_a_thread_lands_without_the_fence(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str, database_url: str
) -> None:
    guard = make_async_guard(ttl=0.6)
    own = create_engine(driver(database_url, "psycopg"))
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        with own.begin() as connection:
            connection.execute(update(Plain).where(Plain.id == 42).values(balance=1))
        done.set()

    with pytest.raises(LeaseLost):
        async with guard.hold(KEY):
            redis_client.delete(lease_key(prefix))
            await asyncio.to_thread(work)
    go.set()
    done.wait()
    own.dispose()
    assert balance(bank, "plain") == 1  # written by one who had lost the lease


def test_a_guard_of_the_other_kind_says_which_one_to_use(
    redis_client: Redis, engine: Any, async_engine: Any
) -> None:
    with pytest.raises(TypeError, match="AsyncGuard"):
        Guard(redis_client, async_engine)
    with pytest.raises(TypeError, match="Guard"):
        AsyncGuard(redis_client, engine)


async def test_a_second_call_in_the_callers_transaction_joins_instead_of_waiting_for_it(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    guard = make_async_guard()

    @guard.fenced("account:{account_id}")
    async def withdraw(session: AsyncSession, account_id: int, amount: int) -> int:
        await session.execute(
            update(Account).where(Account.id == account_id).values(balance=Account.balance - amount)
        )
        return guard.current().token

    async with guard.sessions().begin() as session:
        tokens = {await withdraw(session, 42, 10), await withdraw(session, 42, 10)}
        assert redis_client.exists(lease_key(prefix)) == 1  # kept for the open transaction
    await guard.close()
    assert len(tokens) == 1
    assert redis_client.exists(lease_key(prefix)) == 0
    assert balance(bank, "account") == 80


async def test_a_lease_kept_for_a_transaction_is_given_back_when_that_ends(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    released = asyncio.Event()
    guard = make_async_guard(listener=lambda event: released.set() if isinstance(event, Released) else None)
    async with guard.sessions()() as session:
        async with guard.hold(KEY):
            await session.execute(update(Account).where(Account.id == 42).values(balance=1))
        assert not released.is_set()
        await session.commit()
        async with asyncio.timeout(5):
            await released.wait()
    assert redis_client.exists(lease_key(prefix)) == 0
    assert balance(bank, "account") == 1


async def test_a_loss_between_the_claim_and_the_work_is_raised_before_the_work_begins(
    make_async_guard: MakeGuard, bank: Connection
) -> None:
    def stall(event: Event) -> None:
        if isinstance(event, Claimed):
            threading.Event().wait(0.7)  # the process sleeps past its trust

    guard = make_async_guard(ttl=0.6, listener=stall)
    began = False
    with pytest.raises(LeaseLost):
        async with guard.hold(KEY):
            began = True
    assert not began


async def test_a_cancellation_for_the_loss_that_the_work_swallows_is_taken_back(
    make_async_guard: MakeGuard, bank: Connection, redis_client: Redis, prefix: str
) -> None:
    guard = make_async_guard(ttl=0.6)
    async with guard.hold(KEY):
        redis_client.delete(lease_key(prefix))
        with suppress(asyncio.CancelledError):
            await for_ever()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_the_tasks_of_one_hold_claim_anew_together_and_do_not_push_each_other_out(
    make_async_guard: MakeGuard, bank: Connection
) -> None:
    guard = make_async_guard()
    async with guard.hold(KEY) as held:
        bank.execute("select fenceguard.claim(%s, 5, 'a dead one')", (KEY,))
        with pytest.raises(StaleToken):
            await write(guard, 1)
        async with asyncio.TaskGroup() as group:
            for value in range(8):
                group.create_task(write(guard, value))
        assert held.token == 6  # one token more, not eight


async def test_a_sync_session_in_a_thread_claims_anew_as_well(
    make_async_guard: MakeGuard, bank: Connection, database_url: str
) -> None:
    guard = make_async_guard()
    own = create_engine(driver(database_url, "psycopg"))
    factory = sessionmaker(own)
    guard.attach(factory)

    def work(value: int) -> None:
        with factory.begin() as session:
            session.execute(update(Account).where(Account.id == 42).values(balance=value))

    async with guard.hold(KEY) as held:
        bank.execute("select fenceguard.claim(%s, 5, 'a dead one')", (KEY,))
        with pytest.raises(StaleToken):
            await asyncio.to_thread(work, 1)
        await asyncio.to_thread(work, 2)
        assert held.token == 6
    own.dispose()
    assert balance(bank, "account") == 2
