"""Two holders and a small Redis, under any order of replies, errors, late requests, pauses and clock jumps.

The holders run the real flows and the real `Trust`; only the server, the network and the clocks are modelled.
A pause of a process is that nothing of its own is let happen for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from lease_talk import Talk

from fenceguard._flow import Flow, Pause
from fenceguard.errors import FenceguardError, LeaseLost, StoreUnreachable
from fenceguard.events import Event
from fenceguard.lease import protocol
from fenceguard.lease.protocol import Terms, UnknownScript
from fenceguard.lease.scripts import ACQUIRE, LIFT, RELEASE, RENEW, Call, Keys
from fenceguard.lease.trust import Trust
from fenceguard.model import Grant, Timing

RESOURCE = "account:42"
TIMING = Timing.of(10.0)
"""Safety is 1 s of 10: clocks may differ in speed by a tenth."""


NO_ANSWER = StoreUnreachable("redis", "no answer")


class Interrupted(BaseException):
    """A cancellation."""


@dataclass
class World:
    """True time, and what Redis has."""

    now: float = 0.0
    counter: int = 0
    lease: tuple[int, str, float] | None = None
    granted: list[int] = field(default_factory=list[int])

    def held_by(self) -> str | None:
        return self.lease[1] if self.lease is not None and self.now < self.lease[2] else None

    def execute(self, call: Call) -> Any:
        owner = call.args[0].decode()
        if self.held_by() is None:
            self.lease = None
        if call.script is ACQUIRE:
            return self._acquire(owner)
        ours = self.lease is not None and self.lease[1] == owner
        if call.script is LIFT:
            return self._lift(owner, int(call.args[2])) if ours else [b"taken_over" if self.lease else b"missing"]
        if not ours:
            return -1 if self.lease else 0
        assert self.lease is not None
        if call.script is RENEW:
            self.lease = (*self.lease[:2], self.now + TIMING.ttl)
        else:
            assert call.script is RELEASE
            self.lease = None
        return 1

    def _acquire(self, owner: str) -> Any:
        if self.lease is None:
            self.counter += 1
            self.granted.append(self.counter)
            self.lease = (self.counter, owner, 0.0)
        token, holder, ends = self.lease
        if holder != owner:
            return [b"held", b"%d" % token, holder.encode(), int((ends - self.now) * 1000)]
        self.lease = (token, owner, self.now + TIMING.ttl)
        return [b"granted", b"%d" % token]

    def _lift(self, owner: str, above: int) -> Any:
        self.counter = max(self.counter, above) + 1
        self.granted.append(self.counter)
        self.lease = (self.counter, owner, self.now + TIMING.ttl)
        return [b"lifted", b"%d" % self.counter]


class Clock:
    """A process' clock: of its own speed, and it may leap forward."""

    def __init__(self, world: World, speed: float) -> None:
        self.world, self._speed, self.leapt = world, speed, 0.0

    def __call__(self) -> float:
        return self.world.now * self._speed + self.leapt


class Thread:
    """A flow under way in a process, with the question that it has asked."""

    def __init__(self, clock: Clock, flow: Flow[Any], ended: Callable[[Thread], object]) -> None:
        self._clock, self._ended = clock, ended
        self.reply: list[Any] = []
        self._pause_ends = 0.0
        self.asked: list[Call] = []
        self.error: BaseException | None = None
        self.talk = Talk(flow)
        self._next()

    @property
    def pausing(self) -> bool:
        return isinstance(self.talk.step, Pause)

    @property
    def question(self) -> Call:
        call: Call = self.talk.step
        return call

    def go(self, move: Callable[[Any], object], value: object) -> None:
        try:
            move(value)
        except (FenceguardError, Interrupted) as error:
            self.error = error
        self._next()

    def _next(self) -> None:
        self.reply.clear()
        if self.talk.ended:
            self._ended(self)
        elif self.pausing:
            self._pause_ends = self._clock.world.now + self.talk.step.seconds
        else:
            self.asked.append(self.question)

    def due_at(self) -> float:
        """When a pause is over, in true time."""
        return self._pause_ends


class Holder:
    """A process that acquires, holds with a heartbeat, perhaps lifts, and releases; again and again."""

    def __init__(self, name: str, world: World, speed: float) -> None:
        self.name, self.world = name, world
        self.clock = Clock(world, speed)
        self.events: list[Event] = []
        self.terms = Terms(Keys("fenceguard"), TIMING, self.clock, self.events.append)
        self.lives = 0
        self.trust: Trust | None = None
        self.stopped = True
        self.ending = False
        self.threads: list[Thread] = []
        self.told: list[LeaseLost] = []

    def begin(self, wait: float) -> None:
        self.lives += 1
        self.threads = [Thread(self.clock, self._live(f"{self.name}-{self.lives}", wait), self._over)]

    def _live(self, owner: str, wait: float) -> Flow[None]:
        grant: Grant = yield from protocol.acquire(self.terms, RESOURCE, owner, wait=wait, jitter=lambda: 0.5)
        self.trust = Trust(grant, timing=TIMING, clock=self.clock)
        self.told = []
        self.trust.on_loss(self.told.append)
        self.stopped = self.ending = False
        try:
            yield from protocol.heartbeat(self.terms, self.trust)
        except Interrupted:  # a heartbeat that is hurried to its end
            pass
        finally:
            self.stopped = True
            self.trust.end()
        yield from protocol.release(self.terms, grant)

    def look(self) -> None:
        """Notice, if it is so, that trust has ended."""
        assert self.trust is not None
        assert (self.trust.lost is None) == (self.trust.remaining() > 0)

    def tell_to_end(self) -> None:
        """End the heartbeat as the carriers do: in its pause, or in the middle of a question."""
        self.ending = True
        thread = self.threads[0]
        if thread.pausing:
            thread.go(thread.talk.answer, True)  # noqa: FBT003 the answer of a pause
        else:
            thread.go(thread.talk.interrupt, Interrupted())

    def lift(self, above: int) -> None:
        assert self.trust is not None
        flow = protocol.lift(self.terms, self.trust.grant, above=above)
        self.threads.append(Thread(self.clock, flow, self._lifted))

    def _lifted(self, thread: Thread) -> None:
        assert self.trust is not None
        if isinstance(thread.talk.result, Grant):
            self.trust.lifted(thread.talk.result)
        elif isinstance(thread.error, LeaseLost):
            self.trust.lose(thread.error.reason)
        self._over(thread)

    def _over(self, thread: Thread) -> None:
        self.threads = [other for other in self.threads if other is not thread]

    @property
    def trusts(self) -> bool:
        return self.trust is not None and self.trust.remaining() > 0

    @property
    def holds(self) -> bool:
        return not self.stopped


Move = tuple[str, Callable[[], object]]


class Story:
    """What can happen next, and what must hold at every moment."""

    def __init__(self, speeds: tuple[float, float]) -> None:
        self.world = World()
        self.limbo: list[Call] = []
        self.holders = [Holder(name, self.world, speed) for name, speed in zip("AB", speeds, strict=True)]

    def moves(self) -> list[Move]:
        """Everything that may happen now; what leads somewhere comes several times."""
        moves: list[Move] = [(f"{seconds} s pass", partial(self._pass, seconds)) for seconds in (0.1, 1.5, 4.0)]
        if self.world.held_by() is not None:
            moves += [("the lease ends", self._end_the_lease)] * 2
        moves += [("a late request arrives", partial(self._land, which)) for which in range(len(self.limbo))]
        for holder in self.holders:
            moves += [(f"{holder.name}'s clock leaps", partial(self._leap, holder))]
            moves += [(f"{holder.name}: {what}", act) for what, act in self._moves_of(holder)]
        return moves

    def _moves_of(self, holder: Holder) -> Iterator[Move]:
        if not holder.threads:
            yield from [("begins", partial(holder.begin, 0.0)), ("begins, and waits", partial(holder.begin, 30.0))]
        if holder.trust is not None:
            yield "looks at its trust", holder.look
        if holder.holds and len(holder.threads) == 1:
            yield from [("lifts", partial(holder.lift, 20)), ("is told to end", holder.tell_to_end)]
        for thread in holder.threads:
            likely, unlikely = self._moves_in(thread)
            yield from likely * 8
            yield from unlikely

    def _moves_in(self, thread: Thread) -> tuple[list[Move], list[Move]]:
        fail, interrupt = partial(self._fail, thread), partial(self._interrupt, thread)
        if thread.pausing:
            return [("goes on", partial(self._wake, thread))], [("is interrupted in a pause", interrupt)]
        if thread.reply:
            answer = partial(thread.go, thread.talk.answer, thread.reply[0])
            return [("gets a reply", answer)], [("gets no reply", fail), ("is interrupted", interrupt)]
        unlikely: list[Move] = [("asks too late", fail), ("is interrupted", interrupt)]
        if thread.question.command == "EVALSHA":
            unlikely += [("asks by an unknown name", partial(thread.go, thread.talk.fail, UnknownScript()))]
        return [("asks", partial(self._arrive, thread))], unlikely

    def _pass(self, seconds: float) -> None:
        self.world.now += seconds

    def _end_the_lease(self) -> None:
        assert self.world.lease is not None
        self.world.now = self.world.lease[2]

    def _leap(self, holder: Holder) -> None:
        holder.clock.leapt += 2.0

    def _land(self, which: int) -> None:
        self.world.execute(self.limbo.pop(which))

    def _wake(self, thread: Thread) -> None:
        self.world.now = max(self.world.now, thread.due_at())
        thread.go(thread.talk.answer, False)  # noqa: FBT003 the answer of a pause

    def _arrive(self, thread: Thread) -> None:
        thread.reply.append(self.world.execute(thread.question))

    def _fail(self, thread: Thread) -> None:
        self._lose(thread)
        thread.go(thread.talk.fail, NO_ANSWER)

    def _interrupt(self, thread: Thread) -> None:
        if not thread.talk.settling:
            self._lose(thread)
            thread.go(thread.talk.interrupt, Interrupted())
        else:
            thread.talk.interrupt(Interrupted())

    def _lose(self, thread: Thread) -> None:
        """Leave a request under way, to arrive later or never."""
        if not thread.reply and not thread.pausing:
            self.limbo.append(thread.question)

    def check(self) -> None:
        """Whatever has happened."""
        assert [holder.trusts for holder in self.holders].count(True) <= 1, "two holders trust"
        assert self.world.granted == sorted(set(self.world.granted)), "a token was given twice, or went back"
        for holder in self.holders:
            self._check(holder)

    def _check(self, holder: Holder) -> None:
        assert len(holder.told) <= 1, "a loss was told twice"
        if holder.trusts:
            assert holder.trust is not None
            assert self.world.held_by() == holder.trust.grant.owner, "trusts a lease that it has not"
            assert not holder.told, "trusts again after a loss"
        if holder.stopped or holder.ending:
            asked = [thread.asked[-1].script for thread in holder.threads if thread.asked]
            assert RENEW not in asked, "renews after its heartbeat was told to end"


SPEED = st.sampled_from([1.0, 0.92, 1.1])


@given(st.data(), st.tuples(SPEED, SPEED))
@settings(max_examples=500, derandomize=True, deadline=None)
def test_whatever_is_lost_late_or_asleep_never_do_two_holders_trust(
    data: st.DataObject, speeds: tuple[float, float]
) -> None:
    story = Story(speeds)
    for _ in range(40):
        _, move = data.draw(st.sampled_from(story.moves()))
        move()
        story.check()
