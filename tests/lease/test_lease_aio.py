"""What only asyncio can do to a lease: cancel, stall the loop, end it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio
from lease_faces import Events, Far, R
from support.services import Services

from fenceguard import embedded
from fenceguard.errors import LeaseLost
from fenceguard.events import Renewed
from fenceguard.lease import AsyncLeaseClient
from fenceguard.model import Grant


@pytest.fixture
async def make(services: Services, prefix: str) -> AsyncIterator[Callable[..., AsyncLeaseClient]]:
    """A factory of clients, to be closed."""
    made: list[tuple[AsyncLeaseClient, redis.asyncio.Redis]] = []

    def client(*, url: str = services.redis_url, **options: Any) -> AsyncLeaseClient:
        given = redis.asyncio.Redis.from_url(url)
        options = {"prefix": prefix, "listener": Events(), **options}
        made.append((AsyncLeaseClient(given, **options), given))
        return made[-1][0]

    yield client
    for leases, given in made:
        await leases.close()
        await given.aclose()


async def got(client: AsyncLeaseClient, resource: str = R) -> Grant:
    grant = await client.try_acquire(resource)
    assert grant is not None
    return grant


async def until(condition: Callable[[], Any], within: float = 10.0) -> None:
    """Wait for a state that nothing announces."""
    async with asyncio.timeout(within):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.002)


async def cancelled(task: asyncio.Task[Any]) -> bool:
    """Wait for the end of a task; tell whether a cancellation left it."""
    await asyncio.wait({task})
    return task.cancelled()


def named() -> list[str]:
    """The names of all tasks and threads."""
    return [task.get_name() for task in asyncio.all_tasks()] + [thread.name for thread in threading.enumerate()]


# -- cancellation


@pytest.mark.case(
    "case 17: the task is cancelled during its release",
    control="test_control_a_plain_delete_that_is_cancelled_leaves_the_key",
)
@pytest.mark.parametrize("times", [1, 3])
async def test_a_release_that_is_cancelled_under_way_still_gives_the_lease_back(
    make: Callable[..., AsyncLeaseClient],
    far: Far,
    async_redis: redis.asyncio.Redis,
    key: str,
    times: int,
) -> None:
    """redis-py#3847."""
    grant = await got(make())
    far.link.delay = 0.02
    task = asyncio.create_task(make(url=far.url).release(grant))
    for _ in range(times):
        await asyncio.sleep(0)  # it is under way, and has not even been sent
        task.cancel()
    assert await cancelled(task)
    assert not await async_redis.exists(key)


async def test_a_cancellation_that_was_waiting_when_the_release_began_changes_nothing(
    make: Callable[..., AsyncLeaseClient], own_redis: embedded.Server, prefix: str
) -> None:
    """Not even on a server that does not know the script yet and has to be asked twice."""
    client = make(url=own_redis.url)
    grant = await got(client)

    async def release() -> None:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await client.release(grant)

    assert await cancelled(asyncio.create_task(release()))
    async with redis.asyncio.Redis.from_url(own_redis.url) as admin:
        assert await admin.keys("*") == [f"{prefix}:{{{R}}}:token".encode()]


async def test_control_a_plain_delete_that_is_cancelled_leaves_the_key(
    far: Far, async_redis: redis.asyncio.Redis, key: str
) -> None:
    await async_redis.set(key, "7 me")
    async with redis.asyncio.Redis.from_url(far.url) as plain:
        far.link.delay = 0.02
        task = asyncio.create_task(plain.delete(key))
        await asyncio.sleep(0)
        task.cancel()
        assert await cancelled(task)
    assert await async_redis.exists(key)


async def test_a_cancelled_release_over_a_frozen_link_ends_and_the_lease_keeps_its_ttl(
    make: Callable[..., AsyncLeaseClient], far: Far, async_redis: redis.asyncio.Redis, key: str
) -> None:
    client = make(url=far.url, ttl=1.5)
    grant = await got(client)
    far.link.freeze()
    began = time.monotonic()
    task = asyncio.create_task(client.release(grant))
    await asyncio.sleep(0)
    task.cancel()
    assert await cancelled(task)
    assert time.monotonic() - began < 1.0  # one attempt
    assert 0 < await async_redis.pttl(key) <= 1500
    far.link.thaw()


async def test_an_acquire_that_is_cancelled_after_redis_has_granted_it_leaves_no_lease(
    make: Callable[..., AsyncLeaseClient], far: Far, async_redis: redis.asyncio.Redis, key: str
) -> None:
    client = make(url=far.url)
    await client.inspect(R)
    far.link.delay = 0.1
    task = asyncio.create_task(client.acquire(R, wait=5.0))
    await until(lambda: async_redis.exists(key))
    task.cancel()
    assert await cancelled(task)
    assert not await async_redis.exists(key)


async def test_control_a_plain_set_that_is_cancelled_is_held_by_nobody(
    far: Far, async_redis: redis.asyncio.Redis, key: str
) -> None:
    async with redis.asyncio.Redis.from_url(far.url) as plain:
        await plain.ping()
        far.link.delay = 0.1
        task = asyncio.create_task(plain.set(key, "me", nx=True, px=30000))
        await until(lambda: async_redis.exists(key))
        task.cancel()
        assert await cancelled(task)
    assert await async_redis.exists(key)


async def test_an_acquire_that_runs_into_a_time_out_of_the_callers_leaves_no_lease(
    make: Callable[..., AsyncLeaseClient], far: Far, async_redis: redis.asyncio.Redis, key: str
) -> None:
    client = make(url=far.url)
    await client.inspect(R)
    far.link.delay = 0.1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.15):
            await client.acquire(R, wait=5.0)
    assert not await async_redis.exists(key)


async def test_a_cancelled_wait_ends_and_leaves_the_holders_lease(
    make: Callable[..., AsyncLeaseClient], async_redis: redis.asyncio.Redis, key: str
) -> None:
    await got(make())
    before = await async_redis.get(key)
    task = asyncio.create_task(make().acquire(R, wait=60.0))
    await asyncio.sleep(0.1)
    task.cancel()
    assert await cancelled(task)
    assert await async_redis.get(key) == before


async def test_the_reply_to_a_cancelled_question_is_never_taken_for_the_next_ones(
    make: Callable[..., AsyncLeaseClient], far: Far
) -> None:
    client, chance = make(url=far.url), random.Random(7)  # noqa: S311 no secret
    mine, other = await got(client, "mine"), await got(client, "other")
    far.link.delay = 0.002
    for _ in range(60):
        task = asyncio.create_task(client.inspect("other"))
        await asyncio.sleep(chance.uniform(0, 0.006))
        task.cancel()
        held = await client.inspect("mine")
        assert held is not None
        assert held.owner == mine.owner != other.owner


async def test_a_cancellation_is_never_swallowed(make: Callable[..., AsyncLeaseClient]) -> None:
    """As `asyncio.wait_for`, by which redis-py writes when it has a time-out, does it on Python 3.11."""
    client = make()
    await client.inspect(R)
    for steps in range(12):
        task = asyncio.create_task(client.inspect(R))
        for _ in range(steps):
            await asyncio.sleep(0)
        requested = task.cancel()
        assert await cancelled(task) == requested


async def test_cancelled_questions_cost_no_connection_for_good(make: Callable[..., AsyncLeaseClient]) -> None:
    client = make()
    for _ in range(3):
        tasks = [asyncio.create_task(client.inspect(R)) for _ in range(150)]
        await asyncio.sleep(0.003)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert await asyncio.gather(*(client.inspect(R) for _ in range(150))) == [None] * 150


# -- heartbeats

carriers = pytest.mark.parametrize("carrier", ["task", "thread"])


@carriers
async def test_a_hold_ends_at_once_although_its_renewal_hangs(
    make: Callable[..., AsyncLeaseClient], far: Far, carrier: Any
) -> None:
    client = make(url=far.url, ttl=6.0)
    grant = await got(client)
    async with client.heartbeat(grant, carrier=carrier) as trust:
        far.link.freeze()

        async def asked() -> bool:
            return trust._unanswered

        await until(asked)
        began = time.monotonic()
    beating = [name for name in named() if "heartbeat" in name]
    assert beating == []
    assert time.monotonic() - began < 0.5
    far.link.thaw()


@carriers
async def test_a_cancellation_at_the_end_of_a_hold_comes_after_the_heartbeats_end(
    make: Callable[..., AsyncLeaseClient], carrier: Any
) -> None:
    client = make(ttl=0.6)
    grant = await got(client)
    trusts = []

    async def work() -> None:
        async with client.heartbeat(grant, carrier=carrier) as trust:
            trusts.append(trust)
            asyncio.current_task().cancel()  # type: ignore[union-attr] # meets the exit of the block

    assert await cancelled(asyncio.create_task(work()))
    assert trusts[0].lost is not None
    assert trusts[0].lost.reason == "released"
    assert not [name for name in named() if "heartbeat" in name]


async def test_a_carrier_that_there_is_not_is_refused(make: Callable[..., AsyncLeaseClient]) -> None:
    client = make()
    grant = await got(client)
    with pytest.raises(ValueError, match="carrier must be 'task' or 'thread', not 'process'"):
        async with client.heartbeat(grant, carrier="process"):  # type: ignore[arg-type]
            pass


async def test_a_client_serves_two_loops_at_once(services: Services, prefix: str) -> None:
    given = redis.asyncio.Redis.from_url(services.redis_url)
    client = AsyncLeaseClient(given, prefix=prefix, listener=Events())

    async def many(name: str) -> int:
        tokens = 0
        for _ in range(50):
            grant = await got(client, name)
            tokens = grant.token
            assert await client.release(grant)
        return tokens

    assert await asyncio.gather(many("here"), asyncio.to_thread(lambda: asyncio.run(many("there")))) == [50, 50]
    await client.close()
    await given.aclose()


@carriers
async def test_an_error_of_the_work_leaves_its_block_as_it_is(
    make: Callable[..., AsyncLeaseClient], carrier: Any
) -> None:
    client = make()
    with pytest.raises(ZeroDivisionError):
        async with client.heartbeat(await got(client), carrier=carrier):
            raise ZeroDivisionError


async def test_a_loop_that_is_blocked_for_less_than_the_stall_budget_keeps_its_lease(
    make: Callable[..., AsyncLeaseClient],
) -> None:
    """agno#9512, bullmq#3183: a CPU-bound step longer than renew_every."""
    client = make(ttl=1.5)
    async with client.heartbeat(await got(client)) as trust:
        time.sleep(0.7)  # noqa: ASYNC251 it is what blocks: longer than 0.5, shorter than 0.5 + 0.85
        await asyncio.sleep(0)
        trust.confirm()
        events: Any = client._terms.listener
        assert (await asyncio.to_thread(events.next, Renewed)).gap > 0.6


async def test_a_loop_that_is_blocked_for_longer_than_the_ttl_has_lost_its_lease_at_its_next_step(
    make: Callable[..., AsyncLeaseClient],
) -> None:
    client = make(ttl=0.6)
    async with client.heartbeat(await got(client)) as trust:
        time.sleep(0.7)  # noqa: ASYNC251 it is what blocks
        with pytest.raises(LeaseLost) as caught:
            trust.confirm()
    assert caught.value.reason == "suspended"


async def test_a_thread_renews_while_the_loop_is_blocked_for_longer_than_the_ttl(
    make: Callable[..., AsyncLeaseClient],
) -> None:
    client = make(ttl=0.9)
    grant = await got(client)
    async with client.heartbeat(grant, carrier="thread") as trust:
        time.sleep(1.5)  # noqa: ASYNC251 it is what blocks
        trust.confirm()
    assert await client.release(grant) is True


async def test_who_cancels_every_task_ends_the_heartbeat_and_the_holder_is_told(
    make: Callable[..., AsyncLeaseClient],
) -> None:
    client = make()
    async with client.heartbeat(await got(client)) as trust:
        told: asyncio.Future[LeaseLost] = asyncio.get_running_loop().create_future()
        trust.on_loss(told.set_result)
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        lost = await asyncio.wait_for(told, 5.0)
    assert isinstance(lost.__cause__, asyncio.CancelledError)


async def test_a_thousand_leases_are_renewed_over_a_bounded_number_of_connections(
    make: Callable[..., AsyncLeaseClient], async_redis: redis.asyncio.Redis, services: Services
) -> None:
    del services
    client = make(ttl=3.0)
    grants = await asyncio.gather(*(got(client, f"r{n}") for n in range(1000)))
    renewed = await asyncio.gather(*(client.renew(grant) for grant in grants))
    assert len(renewed) == 1000
    assert await asyncio.gather(*(client.release(grant) for grant in grants)) == [True] * 1000
    assert client._store is not None
    assert len(client._store._redis.connection_pool._available_connections) <= 100
    assert await async_redis.ping()
