"""`@guard.fenced`: what is refused at decoration, which resource a call names, and what a busy one does."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest
from redis import Redis
from sqlalchemy.orm import Session
from support.bank import Account, balance
from support.sql import Connection

from fenceguard import AsyncGuard, Guard, LeaseUnavailable

MakeGuard = Callable[..., Guard]
MakeAsyncGuard = Callable[..., AsyncGuard]


@dataclass
class Order:
    customer_id: int


def test_a_method_is_fenced_by_its_parameters_their_attributes_and_defaults(
    make_guard: MakeGuard, bank: Connection
) -> None:
    guard = make_guard()

    class Repository:
        tenant = "acme"

        @guard.fenced("{self.tenant}/{order.customer_id}/{step}")
        def ship(self, order: Order, step: str = "pack") -> str:
            """Ship an order."""
            return guard.current().resource

    repository = Repository()
    assert repository.ship(Order(7)) == "acme/7/pack"
    assert repository.ship(order=Order(8), step="send") == "acme/8/send"
    assert Repository.ship.__doc__ == "Ship an order."
    assert list(inspect.signature(Repository.ship).parameters) == ["self", "order", "step"]


def test_functions_class_methods_and_static_methods_are_fenced_in_either_order(
    make_guard: MakeGuard, bank: Connection
) -> None:
    guard = make_guard()

    @guard.fenced("job:{name}")
    def function(name: str) -> str:
        return guard.current().resource

    class Jobs:
        prefix = "nightly"

        @classmethod
        @guard.fenced("{cls.prefix}:{name}")
        def inside(cls, name: str) -> str:
            return guard.current().resource

        @guard.fenced("{cls.prefix}:{name}")
        @classmethod
        def outside(cls, name: str) -> str:
            return guard.current().resource

        @staticmethod
        @guard.fenced("static:{name}")
        def static(name: str) -> str:
            return guard.current().resource

    assert function("a") == "job:a"
    assert (Jobs.inside("b"), Jobs().outside("c"), Jobs.static("d")) == ("nightly:b", "nightly:c", "static:d")


async def test_a_coroutine_method_is_fenced(make_async_guard: MakeAsyncGuard, bank: Connection) -> None:
    guard = make_async_guard()
    sessions = guard.sessions()

    class Accounts:
        @guard.fenced("account:{account_id}")
        async def withdraw(self, account_id: int, amount: int) -> int:
            async with sessions.begin() as session:
                account = await session.get_one(Account, account_id)
                account.balance -= amount
                return account.balance

    assert await Accounts().withdraw(42, 30) == 70
    assert balance(bank, "account") == 70


def test_a_busy_resource_raises_or_is_skipped_as_told(make_guard: MakeGuard, bank: Connection) -> None:
    guard, other = make_guard(), make_guard()
    calls: list[str] = []

    @guard.fenced("job:{name}")
    def raising(name: str) -> str:
        calls.append(name)
        return name

    @guard.fenced("job:{name}", on_unavailable="skip")
    def skipping(name: str) -> str:
        calls.append(name)
        return name

    with other.hold("job:a"):
        with pytest.raises(LeaseUnavailable):
            raising("a")
        assert skipping("a") is None
    assert calls == []
    assert skipping("a") == "a"


def test_skip_covers_the_calls_own_lease_and_not_one_that_its_body_asks_for(
    make_guard: MakeGuard, bank: Connection
) -> None:
    guard, other = make_guard(), make_guard()

    @guard.fenced("job:{name}", on_unavailable="skip")
    def outer(name: str) -> None:
        with guard.hold("job:inner"):
            pass

    with other.hold("job:inner"), pytest.raises(LeaseUnavailable):
        outer("a")


async def test_skip_on_a_coroutine_covers_its_own_lease_only(
    make_async_guard: MakeAsyncGuard, bank: Connection
) -> None:
    guard, other = make_async_guard(), make_async_guard()

    @guard.fenced("job:{name}", on_unavailable="skip")
    async def outer(name: str) -> str:
        async with guard.hold("job:inner"):
            return name

    async with other.hold("job:a"):
        assert await outer("a") is None
    async with other.hold("job:inner"):
        with pytest.raises(LeaseUnavailable):
            await outer("a")
    assert await outer("a") == "a"


def test_the_session_named_by_a_path_is_flushed_before_the_hold_ends(
    make_guard: MakeGuard, bank: Connection
) -> None:
    guard = make_guard()

    class Accounts:
        def __init__(self, session: Session) -> None:
            self.session = session

        @guard.fenced("account:{account_id}", session="self.session")
        def empty(self, account_id: int) -> None:
            self.session.get_one(Account, account_id).balance = 0

    with guard.sessions().begin() as session:
        Accounts(session).empty(42)
    assert balance(bank, "account") == 0


@pytest.mark.parametrize(
    "template",
    ["job:{missing}", "job:{args}", "job:{kwargs}", "{missing.id}"],
    ids=["name", "args", "kwargs", "path"],
)
def test_a_field_that_the_signature_lacks_is_a_type_error_at_decoration(template: str) -> None:
    def function(name: str, *args: int, **kwargs: int) -> None: ...

    with pytest.raises(TypeError, match="has no parameter"):
        Guard().fenced(template)(function)


@pytest.mark.parametrize("template", ["", "job:{", "job:}", "job:{}", "{a}{b}", "job:{a b}"])
def test_a_malformed_template_is_a_value_error_at_decoration(template: str) -> None:
    def function(a: str, b: str) -> None: ...

    with pytest.raises(ValueError, match=r"template|resource"):
        Guard().fenced(template)(function)


def test_the_wrong_kind_of_function_is_a_type_error_at_decoration() -> None:
    async def coroutine() -> None: ...

    def function() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match="AsyncGuard"):
        Guard().fenced("job")(coroutine)
    with pytest.raises(TypeError, match="Guard"):
        AsyncGuard().fenced("job")(function)
    for odd in (generator, async_generator):
        with pytest.raises(TypeError, match="generator"):
            Guard().fenced("job")(odd)
        with pytest.raises(TypeError, match="generator"):
            AsyncGuard().fenced("job")(odd)


def test_a_decorator_without_its_template_is_a_type_error_at_decoration() -> None:
    def function() -> None: ...

    for guard in (Guard(), AsyncGuard()):
        with pytest.raises(TypeError, match="with a template"):
            guard.fenced(function)  # type: ignore[call-overload]


def test_other_arguments_of_the_decorator_are_checked_at_decoration() -> None:
    def function(name: str) -> None: ...

    with pytest.raises(ValueError, match="on_unavailable"):
        Guard().fenced("job", on_unavailable="ignore")(function)
    with pytest.raises(ValueError, match="wait"):
        Guard().fenced("job", wait=-1.0)
    with pytest.raises(TypeError, match="has no parameter 'self'"):
        Guard().fenced("job", session="self.session")(function)


@pytest.mark.parametrize("value", [True, None, 1.5, "", "a/b"], ids=repr)
def test_a_value_that_names_no_resource_is_refused_before_anything_is_leased(
    make_guard: MakeGuard, redis_client: Redis, prefix: str, value: object
) -> None:
    @make_guard().fenced("{tenant}/{name}")
    def function(tenant: object, name: str) -> None: ...

    with pytest.raises((TypeError, ValueError), match="tenant"):
        function(value, "x")
    assert redis_client.keys(f"{prefix}*") == []
