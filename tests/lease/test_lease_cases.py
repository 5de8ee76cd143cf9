"""Faults that users of other lease libraries met, on a real server, for every kind of client."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from lease_faces import Events, Face, Far, R, Told
from redis.connection import parse_url
from support.services import Services
from support.workers import Worker

from fenceguard import embedded
from fenceguard.errors import LeaseLost, LeaseUnavailable, StoreUnreachable
from fenceguard.events import Lost, Renewed
from fenceguard.lease import LeaseClient, protocol
from fenceguard.model import Grant

Faces = Callable[..., Face]


@pytest.fixture
def process(worker: Callable[..., Worker], services: Services, prefix: str) -> Callable[..., Worker]:
    """A factory of processes that can hold leases, see `lease_holder.py`."""

    def start(*, ttl: float = 30.0, owner: str = "worker", url: str = services.redis_url) -> Worker:
        holder = worker(Path(__file__).with_name("lease_holder.py"), url, prefix, str(ttl), owner)
        assert holder.hear() == "ready"
        return holder

    return start


def until(condition: Callable[[], object], within: float = 10.0) -> None:
    """Wait for a state that nothing announces."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.002)


def expire(redis_client: redis.Redis, key: str) -> None:
    """End a lease as its ttl would."""
    assert redis_client.delete(key) == 1


# -- who is who


@pytest.mark.case("case 5: renewal matches by name only", control="none: no write is at stake, the lease alone is")
def test_a_renewal_needs_the_owner_of_this_acquisition_not_only_the_resource(
    face: Faces, redis_client: redis.Redis, key: str
) -> None:
    """oban#1488: two leaders, each renewing by name."""
    client = face(owner="leader")
    first = client.got(R)
    expire(redis_client, key)
    second = client.got(R)
    redis_client.pexpire(key, 5000)
    with pytest.raises(LeaseLost) as caught:
        client.renew(first)
    assert caught.value.reason == "taken_over"
    assert redis_client.pttl(key) <= 5000
    assert client.renew(second).token == second.token
    assert redis_client.pttl(key) > 25000


@pytest.mark.case(
    "case 6: owner defaults to the host name", control="none: no write is at stake, the lease alone is"
)
def test_owners_are_unique_within_one_process_of_one_host(face: Faces) -> None:
    """oban-py#32: three leaders on one host."""
    clients = [face(), face(), face()]
    owners = {client.got(f"r{n}").owner for n in range(10) for client in clients[n % 3 : n % 3 + 1]}
    assert len(owners) == 10
    assert [client.try_acquire("r0") for client in clients] == [None] * 3


@pytest.mark.case(
    "case 7: two processes share an owner name", control="none: no write is at stake, the lease alone is"
)
def test_processes_that_share_an_owners_name_do_not_touch_each_others_lease(
    face: Faces, process: Callable[..., Worker], redis_client: redis.Redis, key: str
) -> None:
    """ShedLock#317."""
    mine = face(owner="host").got(R)
    expire(redis_client, key)
    other = process(owner="host")
    assert ask(other, "acquire", R, "0")["result"]["owner"].startswith("host-")
    held = redis_client.get(key)
    again = face(owner="host")
    with pytest.raises(LeaseLost):
        again.renew(mine)
    assert again.release(mine) is False
    assert redis_client.get(key) == held


# -- replies that are lost


@pytest.mark.case(
    "reply of acquire lost (proxy cut): same grant, ttl refreshed",
    control="test_control_a_plain_set_nx_does_not_know_its_own_lease_when_the_reply_is_lost",
)
def test_the_reply_to_acquire_is_lost_the_grant_is_recognised(
    face: Faces, far: Far, redis_client: redis.Redis, prefix: str
) -> None:
    client = face(url=far.url)
    client.warm()
    far.link.swallow_next_reply()
    grant = client.got(R)
    far.link.wait_swallowed(0)
    assert grant.token == 1
    assert redis_client.get(f"{prefix}:{{{R}}}:token") == b"1"


def test_control_a_plain_set_nx_does_not_know_its_own_lease_when_the_reply_is_lost(far: Far, key: str) -> None:
    with redis.Redis(**parse_url(far.url)) as client:  # with redis-py's own retries, as a constructor sets them
        client.ping()
        far.link.swallow_next_reply()
        assert client.set(key, "me", nx=True, px=30000) is None  # "not acquired": redis-py asked again by itself
        assert client.get(key) == b"me"


@pytest.mark.case(
    "case 40: own grant recognised at a retry 0.6 s later",
    control="test_control_a_plain_set_nx_does_not_know_its_own_lease_when_the_reply_is_lost",
)
def test_own_grant_recognised_at_a_retry_lives_a_whole_ttl_from_then_on(
    face: Faces, far: Far, redis_client: redis.Redis, key: str
) -> None:
    """Trust must not outlive the lease: Redis' ttl is refreshed as well."""
    client = face(url=far.url, ttl=3.0)
    client.warm()
    far.link.swallow_next_reply()
    flow = protocol.try_acquire(client.client._terms, R, "me")
    before = client.client.clock()
    grant = client.drive(flow, lambda _: time.sleep(0.6))
    lives_until = client.client.clock() + redis_client.pttl(key) / 1000
    assert grant is not None
    assert grant.trusted_until >= before + 0.6 + 2.7
    assert grant.trusted_until < lives_until


@pytest.mark.case(
    "case 8: release is retried after an ambiguous reply", control="none: no write is at stake, the lease alone is"
)
def test_a_release_whose_reply_was_lost_leaves_the_lease_that_was_acquired_meanwhile(
    face: Faces, far: Far, redis_client: redis.Redis, key: str
) -> None:
    """etcd#22082."""
    client, again = face(url=far.url, owner="same"), face(owner="same")
    client.warm()
    first, newer = client.got(R), list[Grant]()
    far.link.swallow_next_reply()
    released = client.drive(protocol.release(client.client._terms, first), lambda _: newer.append(again.got(R)))
    assert released is False
    assert redis_client.get(key) == f"{newer[0].token} {newer[0].owner}".encode()


@pytest.mark.case(
    "case 9: a renewal succeeds and its reply is lost", control="none: no write is at stake, the lease alone is"
)
def test_a_renewal_whose_reply_was_lost_is_no_loss(face: Faces, far: Far) -> None:
    """dynamolock#280."""
    client = face(url=far.url, ttl=1.5)
    client.warm()
    with client.heartbeat(client.got(R)) as trust:
        far.link.swallow_next_reply()
        far.link.wait_swallowed()
        client.events.next(Renewed)
        trust.confirm()


@pytest.mark.case("case 11: exactly one renewal fails", control="none: no write is at stake, the lease alone is")
def test_one_renewal_that_fails_goes_unnoticed(face: Faces, far: Far) -> None:
    """redisson#775: the connection is reset before the request arrives."""
    client = face(url=far.url, ttl=1.5)
    with client.heartbeat(client.got(R)) as trust:
        told = Told(trust, client.client.clock)
        far.link.freeze()
        until(lambda: trust._unanswered)
        far.link.cut()
        far.link.thaw()
        client.events.next(Renewed)
        trust.confirm()
        assert told.nothing


@pytest.mark.case("case 15: a renewal raises", control="none: no write is at stake, the lease alone is")
def test_a_renewal_that_is_answered_with_an_error_is_tried_again(face: Faces, own_redis: embedded.Server) -> None:
    """pglock#40: only the answer "not yours" means lost."""
    client = face(url=own_redis.url, ttl=1.5)
    with redis.Redis.from_url(own_redis.url) as admin, client.heartbeat(client.got(R)) as trust:
        told = Told(trust, client.client.clock)
        admin.execute_command("ACL", "SETUSER", "default", "-eval", "-evalsha")
        until(lambda: trust._unanswered)
        client.events.drain()
        admin.execute_command("ACL", "SETUSER", "default", "+eval", "+evalsha")
        client.events.next(Renewed)
        trust.confirm()
        assert told.nothing


# -- loss


@pytest.mark.case("case 13: renewal keeps failing", control="none: no write is at stake, the lease alone is")
def test_when_the_server_is_gone_the_holder_is_told_why_before_the_ttl_can_have_ended(
    face: Faces, own_redis: embedded.Server
) -> None:
    """redisson#4698."""
    client = face(url=own_redis.url, ttl=1.0)
    grant = client.got(R)
    with client.heartbeat(grant) as trust:
        told = Told(trust, client.client.clock)
        own_redis.kill()
        at, lost = told.wait()
        assert lost.reason == "store_unreachable"
        assert at < trust.grant.trusted_until + 0.1  # a tenth of the ttl: what is kept for safety
        with pytest.raises(LeaseLost) as caught:
            trust.confirm()
    assert caught.value.reason == "store_unreachable"
    assert client.events.next(Lost).reason == "store_unreachable"


@pytest.mark.case(
    "case 16: a renewal hangs", control="test_control_without_own_time_outs_a_hung_renewal_outlives_the_ttl"
)
def test_a_renewal_that_hangs_stops_the_work_before_the_ttl_is_over(face: Faces, far: Far) -> None:
    """kubernetes#44887: the link freezes, nothing is refused and nothing answered."""
    client = face(url=far.url, ttl=1.5)
    with client.heartbeat(client.got(R)) as trust:
        told = Told(trust, client.client.clock)
        far.link.freeze()
        at, lost = told.wait()
        far.link.thaw()
    assert lost.reason == "store_unreachable"
    assert at < trust.grant.trusted_until + 0.15


def test_control_without_own_time_outs_a_hung_renewal_outlives_the_ttl(far: Far) -> None:
    with redis.Redis.from_url(far.url, socket_timeout=2.0) as client:
        client.ping()
        far.link.freeze()
        began = time.monotonic()
        with pytest.raises(redis.TimeoutError):
            client.pexpire("any", 1500)
        took = time.monotonic() - began
        far.link.thaw()
    assert took > 1.5


def test_a_takeover_is_noticed_within_one_renewal(face: Faces, redis_client: redis.Redis, key: str) -> None:
    client = face(ttl=1.5)
    with client.heartbeat(client.got(R)) as trust:
        told = Told(trust, client.client.clock)
        expire(redis_client, key)
        new = face().got(R)
        taken_over = client.client.clock()
        at, lost = told.wait()
        assert lost.reason == "taken_over"
        assert at - taken_over < 0.5 + 0.2
        assert trust.remaining() <= 0
    assert client.inspect(R) is not None
    assert redis_client.get(key) == f"{new.token} {new.owner}".encode()


def test_a_lease_that_redis_has_forgotten_is_lost_as_missing(
    face: Faces, redis_client: redis.Redis, key: str
) -> None:
    client = face(ttl=0.6)
    with client.heartbeat(client.got(R)) as trust:
        told = Told(trust, client.client.clock)
        expire(redis_client, key)
        assert told.wait()[1].reason == "missing"


@pytest.mark.case(
    "case 19: the lease was taken over, the old holder renews",
    control="none: no write is at stake, the lease alone is",
)
def test_the_old_holders_renewal_leaves_the_new_holders_ttl_unchanged(
    face: Faces, redis_client: redis.Redis, key: str
) -> None:
    """redbeat#127."""
    old = face().got(R)
    expire(redis_client, key)
    face().got(R)
    redis_client.pexpire(key, 5000)
    with pytest.raises(LeaseLost) as caught:
        face().renew(old)
    assert caught.value.reason == "taken_over"
    assert 4000 < redis_client.pttl(key) <= 5000


@pytest.mark.case(
    "case 25: redis-py reconnects between acquire and work",
    control="none: no write is at stake, the lease alone is",
)
def test_holding_rests_on_the_grant_and_never_on_the_connection(
    face: Faces, far: Far, redis_client: redis.Redis, key: str
) -> None:
    """portalocker#137: redis-py reconnects silently."""
    client = face(url=far.url)
    grant = client.got(R)
    far.link.cut()
    assert client.renew(grant).token == grant.token  # another connection, the same lease
    expire(redis_client, key)
    face().got(R)
    with pytest.raises(LeaseLost) as caught:  # the same connection, another's lease
        client.renew(grant)
    assert caught.value.reason == "taken_over"


def test_after_max_hold_the_lease_is_lost_and_ends(face: Faces, redis_client: redis.Redis, key: str) -> None:
    client = face(ttl=0.6)
    with client.heartbeat(client.got(R), max_hold=0.8) as trust:
        _, lost = Told(trust, client.client.clock).wait()
        assert lost.reason == "max_hold"
        until(lambda: not redis_client.exists(key), within=2.0)


def test_a_lease_of_1_5_s_is_held_through_3_s_of_work(face: Faces) -> None:
    client, other = face(ttl=1.5), face()
    grant = client.got(R)
    with client.heartbeat(grant) as trust:
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            client.events.next(Renewed)
            trust.confirm()
            assert other.try_acquire(R) is None
    assert client.release(grant) is True


# -- waiting


def test_when_waiting_times_out_the_body_does_not_run(face: Faces) -> None:
    """redis-py#621."""
    holder = face(owner="holder").got(R)
    client, ran, began = face(), False, time.monotonic()
    with pytest.raises(LeaseUnavailable) as caught, client.heartbeat(client.acquire(R, wait=0.2)):
        ran = True
    assert not ran
    assert 0.2 <= time.monotonic() - began < 2.0
    assert caught.value.owner == holder.owner
    assert 25 < caught.value.retry_after <= 30


def test_who_waits_gets_the_lease_when_it_is_given_back(face: Faces) -> None:
    client = face()
    grant = client.got(R)
    timer = threading.Timer(0.2, client.release, (grant,))
    timer.start()
    try:
        waited = face().acquire(R, wait=10.0)
    finally:
        timer.join()
    assert waited.token == grant.token + 1


def test_who_waits_gets_the_lease_of_a_dead_holder_after_one_ttl(face: Faces) -> None:
    dead = face(ttl=0.5).got(R)
    began = time.monotonic()
    waited = face().acquire(R, wait=10.0)
    assert waited.token == dead.token + 1
    assert time.monotonic() - began < 0.5 + 0.3


# -- ends


@pytest.mark.case(
    "case 10: acquire and release in a tight loop", control="none: no write is at stake, the lease alone is"
)
def test_a_tight_loop_of_holds_leaves_no_renewal_key_thread_or_task(
    face: Faces, own_redis: embedded.Server
) -> None:
    """redisson#7272."""
    client = face(url=own_redis.url, ttl=6.0, renew_every=0.3)
    threads = set(threading.enumerate())
    for turn in range(CYCLES[client.kind]):
        grant = client.got(R)
        with client.heartbeat(grant) as trust:
            if turn % 200 == 0:  # some live long enough for a renewal
                client.events.next(Renewed)
            trust.confirm()
        assert client.release(grant) is True
    assert set(threading.enumerate()) - threads == set()
    with redis.Redis.from_url(own_redis.url) as admin:
        assert admin.keys("*:lease") == []
        before = scripts_run(admin)
        time.sleep(0.7)  # more than twice renew_every: that nothing comes has no event
        assert scripts_run(admin) == before


CYCLES = {"sync": 2_000, "task": 2_000, "thread": 500}


def scripts_run(admin: redis.Redis) -> int:
    stats: Any = admin.info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


def test_a_release_says_whether_the_lease_was_ours(face: Faces) -> None:
    client = face()
    grant = client.got(R)
    assert [client.release(grant), client.release(grant)] == [True, False]


def test_a_release_without_an_answer_ends_within_its_bound_and_the_lease_with_its_ttl(
    face: Faces, far: Far, redis_client: redis.Redis, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = face(url=far.url, ttl=1.5)
    grant = client.got(R)
    far.link.freeze()
    began = time.monotonic()
    assert client.release(grant) is False
    assert time.monotonic() - began < 1.5 + 0.5
    assert "ends with its ttl" in caplog.text
    far.link.thaw()
    until(lambda: not redis_client.exists(key), within=3.0)


def test_after_its_heartbeat_a_trust_is_released_and_nobody_is_told_of_a_loss(face: Faces) -> None:
    client = face()
    with client.heartbeat(client.got(R)) as trust:
        told = Told(trust, client.client.clock)
    assert trust.lost is not None
    assert trust.lost.reason == "released"
    assert told.nothing
    assert not [event for event in client.events.drain() if isinstance(event, Lost)]


def test_a_grant_without_trust_begins_no_heartbeat(face: Faces, redis_client: redis.Redis, key: str) -> None:
    client = face(ttl=0.3)
    grant = client.got(R)
    until(lambda: not redis_client.exists(key), within=2.0)
    ran = False
    with pytest.raises(LeaseLost) as caught, client.heartbeat(grant):
        ran = True
    assert not ran
    assert caught.value.reason == "suspended"


def test_a_failure_of_the_heartbeat_itself_reaches_the_holder_as_a_loss_with_its_cause(
    face: Faces, caplog: pytest.LogCaptureFixture
) -> None:
    client = face(ttl=0.6)
    grant = client.got(R)
    with client.heartbeat(grant) as trust:
        told = Told(trust, client.client.clock)
        trust.asking = broken  # type: ignore[method-assign]
        _, lost = told.wait()
        assert isinstance(lost.__cause__, ZeroDivisionError)
        with pytest.raises(LeaseLost) as caught:
            trust.confirm()
    assert caught.value.reason == "store_unreachable"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "the heartbeat of 'account:42' failed" in caplog.text


def broken() -> None:
    raise ZeroDivisionError


# -- what Redis has


def test_a_lease_always_has_a_ttl(face: Faces, redis_client: redis.Redis, key: str) -> None:
    client = face(ttl=2.0)
    grant, seen = client.got(R), []
    for step in (lambda: client.renew(grant), lambda: client.lift(grant, above=7), lambda: client.renew(grant)):
        seen.append(redis_client.pttl(key))
        step()
        seen.append(redis_client.pttl(key))
    assert all(1500 < ttl <= 2000 for ttl in seen)


def test_tokens_grow_and_the_counter_stays(face: Faces, redis_client: redis.Redis, prefix: str) -> None:
    client, tokens = face(), []
    for _ in range(3):
        grant = client.got(R)
        tokens.append(grant.token)
        client.release(grant)
    assert tokens == [1, 2, 3]
    assert redis_client.get(f"{prefix}:{{{R}}}:token") == b"3"
    assert redis_client.ttl(f"{prefix}:{{{R}}}:token") == -1


def test_scripts_that_the_server_forgot_are_sent_again(face: Faces, own_redis: embedded.Server) -> None:
    client = face(url=own_redis.url)
    with redis.Redis.from_url(own_redis.url) as admin:
        results: list[Any] = []
        for step in (
            lambda: client.got(R),
            lambda: client.renew(results[0]),
            lambda: client.lift(results[0], above=7),
            lambda: client.inspect(R).token,
            lambda: client.release(results[0]),
        ):
            admin.script_flush()
            results.append(step())
    assert [results[0].token, results[2].token, results[3], results[4]] == [1, 8, 8, True]


def test_a_lift_puts_the_token_above_the_fence_and_the_lease_and_counter_follow(
    face: Faces, redis_client: redis.Redis, prefix: str, key: str
) -> None:
    client = face()
    grant = client.got(R)
    lifted = client.lift(grant, above=7)
    assert (lifted.token, lifted.owner) == (8, grant.owner)
    assert redis_client.get(key) == f"8 {grant.owner}".encode()
    assert redis_client.get(f"{prefix}:{{{R}}}:token") == b"8"
    assert client.lift(grant, above=3).token == 9  # of the counter, the fence and the lease's token the largest
    assert client.release(grant) is True
    assert client.got(R).token == 10


def test_only_the_owner_may_lift(face: Faces, redis_client: redis.Redis, prefix: str, key: str) -> None:
    client = face()
    grant = client.got(R)
    expire(redis_client, key)
    with pytest.raises(LeaseLost) as missing:
        client.lift(grant, above=7)
    other = face().got(R)
    with pytest.raises(LeaseLost) as taken_over:
        client.lift(grant, above=7)
    assert (missing.value.reason, taken_over.value.reason) == ("missing", "taken_over")
    assert redis_client.get(key) == f"{other.token} {other.owner}".encode()
    assert redis_client.get(f"{prefix}:{{{R}}}:token") == b"2"


def test_a_renewal_goes_on_under_a_lifted_token(face: Faces) -> None:
    client = face(ttl=0.6)
    grant = client.got(R)
    with client.heartbeat(grant) as trust:
        trust.lifted(client.lift(grant, above=7))
        client.events.drain()
        assert client.events.next(Renewed).token == 8
        assert trust.grant.token == 8


def test_after_the_last_token_nothing_is_given_and_nothing_is_half_done(
    face: Faces, redis_client: redis.Redis, prefix: str, key: str
) -> None:
    last, counter = 2**53 - 1, f"{prefix}:{{{R}}}:token"
    redis_client.set(counter, last - 2)
    client = face()
    grant = client.got(R)
    assert grant.token == last - 1
    assert client.lift(grant, above=3).token == last
    with pytest.raises(StoreUnreachable, match=f"has given out its last token, {last}"):
        client.lift(grant, above=3)
    assert redis_client.get(key) == f"{last} {grant.owner}".encode()
    client.release(grant)
    with pytest.raises(StoreUnreachable, match=f"has given out its last token, {last}"):
        client.try_acquire(R)
    assert redis_client.get(counter) == b"%d" % last
    assert not redis_client.exists(key)


@pytest.mark.parametrize("value", [b"abc", b"-1", b"1.5", b""])
def test_a_counter_that_is_none_is_named_and_no_lease_is_left(
    face: Faces, redis_client: redis.Redis, prefix: str, key: str, value: bytes
) -> None:
    counter = f"{prefix}:{{{R}}}:token"
    redis_client.set(counter, value)
    with pytest.raises(StoreUnreachable) as caught:
        face().try_acquire(R)
    assert repr(counter) in str(caught.value)
    assert redis_client.get(counter) == value
    assert not redis_client.exists(key)


def test_a_lease_key_that_is_not_ours_is_named_and_left_alone(
    face: Faces, redis_client: redis.Redis, key: str
) -> None:
    redis_client.set(key, "something else")
    client = face()
    for ask_for in (client.try_acquire, client.inspect):
        with pytest.raises(StoreUnreachable) as caught:
            ask_for(R)
        assert repr(key) in str(caught.value)
    assert redis_client.get(key) == b"something else"


@pytest.mark.parametrize("name", ["é日本🙂", "{}%", "a b", "}{", "%7B", "x" * 512, "a:lease", "\\ ' \" ; *"])
def test_odd_names_are_resources_like_any_other(
    face: Faces, redis_client: redis.Redis, prefix: str, name: str
) -> None:
    client = face()
    grant, other = client.got(name), client.got("another")
    held = client.inspect(name)
    assert held is not None
    assert (held.resource, held.owner, held.token) == (name, grant.owner, 1)
    keys = [key.decode() for key in redis_client.keys(f"{prefix}:*")]
    assert len(keys) == 4
    assert all(key.count("{") == key.count("}") == 1 for key in keys)
    assert client.renew(grant).token == 1
    assert client.release(grant) is True
    assert client.release(other) is True


def test_names_that_are_encoded_do_not_collide(face: Faces) -> None:
    client = face()
    assert [client.got(name).token for name in ("{", "%7B", "%257B")] == [1, 1, 1]


# -- processes


def ask(holder: Worker, *words: str) -> dict[str, Any]:
    holder.say("\t".join(words))
    answer: dict[str, Any] = json.loads(holder.hear())
    return answer


@pytest.fixture
def holding(process: Callable[..., Worker]) -> Worker:
    """A process that holds a lease of 1 s with its heartbeat."""
    holder = process(ttl=1.0)
    assert ask(holder, "acquire", R, "0")["error"] is None
    assert ask(holder, "hold_on")["error"] is None
    return holder


def test_a_process_frozen_past_its_ttl_stops_at_its_first_step_after_waking(
    holding: Worker, services: Services, prefix: str, redis_client: redis.Redis, key: str
) -> None:
    """redisson#5698: by its own clock, before it asks anybody."""
    holding.freeze()
    until(lambda: not redis_client.exists(key), within=3.0)
    new = LeaseClient(redis.Redis.from_url(services.redis_url), prefix=prefix, listener=Events()).try_acquire(R)
    assert new is not None
    holding.say("confirm")
    holding.thaw()
    assert json.loads(holding.hear())["error"] in ("suspended", "store_unreachable")
    assert ask(holding, "renew")["error"] == "taken_over"
    assert ask(holding, "release")["result"] is False
    assert redis_client.get(key) == f"{new.token} {new.owner}".encode()


def test_a_forked_child_ends_normally_and_the_parents_lease_is_untouched(
    holding: Worker, redis_client: redis.Redis, key: str
) -> None:
    before = redis_client.get(key)
    seen = ask(holding, "fork")["result"]
    assert seen == {
        "remaining": float("-inf"),
        "lost": "forked",
        "confirm": "forked",
        "renew": "forked",
        "lift": "forked",
        "heartbeat": "forked",
        "released": False,
        "own": True,
        "exit": 0,
    }
    assert redis_client.get(key) == before
    assert ask(holding, "confirm")["error"] is None
    assert ask(holding, "release")["result"] is True


def test_a_process_that_ends_inside_its_hold_does_end_and_its_lease_expires(
    holding: Worker, redis_client: redis.Redis, key: str
) -> None:
    began = time.monotonic()
    ask(holding, "leave")
    assert holding.wait() == 0
    assert time.monotonic() - began < 5.0
    until(lambda: not redis_client.exists(key), within=1.5)


def test_an_interrupt_from_the_keyboard_while_acquiring_leaves_no_lease(
    process: Callable[..., Worker], far: Far, redis_client: redis.Redis, key: str
) -> None:
    holder = process(url=far.url)
    far.link.delay = 0.3  # before the request, and before the reply
    holder.say(f"acquire\t{R}\t0")
    until(lambda: redis_client.exists(key))
    os.kill(holder.pid, signal.SIGINT)
    assert json.loads(holder.hear())["error"] == "interrupted"
    assert not redis_client.exists(key)
