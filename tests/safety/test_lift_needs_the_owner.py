"""The lift's condition taken away: a holder that lost its lease lifts itself over the live one, and pushes it out.

Minting a token for whoever asks is shape 9 of those seen to fail. Beside the mutation, the test of the lease room
that goes red with it is `test_only_the_owner_may_lift`.
"""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis
from support.bank import KEY
from support.guarded import keys
from support.sql import Connection, announce, claim, sqlstate

from fenceguard import LeaseClient
from fenceguard.lease.scripts import LIFT

CONDITION = "if owner ~= ARGV[1] then return {'taken_over'} end\n"
WRITE = "update account set balance = 0 where id = 42"


def the_live_holder_is_pushed_out(
    script: str, client: LeaseClient, redis_client: Redis, prefix: str, bank: Connection
) -> bool:
    """A loses its lease to B, who claims; then A runs the lift and claims what it got; B writes."""
    lease, counter = keys(prefix)
    dead = client.acquire(KEY, wait=0.0)
    redis_client.delete(lease)
    live = client.acquire(KEY, wait=0.0)
    claim(bank, KEY, live.token, live.owner)
    answer: Any = redis_client.eval(script, 2, lease, counter, dead.owner, "10000", str(live.token))
    if answer[0] == b"lifted":
        claim(bank, KEY, int(answer[1]), dead.owner)
    bank.execute("begin")
    announce(bank, (KEY, live.token, live.owner))
    refused = sqlstate(bank, WRITE) == "ZF001"
    bank.execute("rollback")
    return refused


@pytest.mark.parametrize("mutated", [False, True], ids=["with the condition", "without the condition"])
@pytest.mark.case("mutation: the lift's owner condition", control="inside")
def test_only_without_the_owner_condition_a_dead_holder_pushes_the_live_one_out(
    mutated: bool,  # noqa: FBT001 pytest's
    bank: Connection,
    redis_client: Redis,
    prefix: str,
) -> None:
    assert LIFT.source.count(CONDITION) == 1
    script = LIFT.source.replace(CONDITION, "") if mutated else LIFT.source
    with LeaseClient(redis_client, prefix=prefix) as client:
        assert the_live_holder_is_pushed_out(script, client, redis_client, prefix, bank) is mutated
