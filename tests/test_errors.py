"""Every error says what happened, pickles, and is found by its SQLSTATE."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from fenceguard import errors
from fenceguard.errors import FenceguardError, refusal

EXAMPLES: list[FenceguardError] = [
    errors.LeaseUnavailable("account:42", "worker-1", 1.25),
    *(errors.LeaseLost("account:42", reason) for reason in get_args(errors.LostReason)),
    errors.StaleToken("account:42", 7, 8, "public.account", {"id": 42}),
    errors.StaleToken("account:42", 7, 8, "public.account"),
    errors.StaleToken("account:42", 7, 7, owner="worker-2"),
    errors.UnfencedWrite("public.account"),
    errors.NotClaimed("account:42", 7),
    errors.WrongResource("public.account", "account:43", ["account:42"]),
    errors.WrongResource("public.account", None, []),
    errors.TransactionTooOld("account:42", 7),
    errors.TooManyResources(65, 64),
    errors.ClaimTimeout("account:42", 1.5, ["backend 17, active since 12:00:00: update account"]),
    errors.ClaimTimeout("account:42", 1.5, []),
    errors.OpenTransaction("account:42"),
    errors.OutcomeUnknown(12345, "1"),
    errors.SchemaMissing("fenceguard's schema is missing", "run fenceguard migrate up"),
    errors.TablesStillFenced(["public.account", "public.ledger"]),
    errors.StoreUnreachable("redis", "connection refused at 127.0.0.1:6379"),
    errors.EmbeddedUnavailable("postgres", "the wheel is missing"),
]


def tree() -> Iterator[type[FenceguardError]]:
    """Yield the error classes of the package."""
    found: list[type[FenceguardError]] = [FenceguardError]
    for cls in found:
        found += cls.__subclasses__()
    return (cls for cls in found[1:] if cls.__module__ == "fenceguard.errors")


def test_every_error_has_an_example_here() -> None:
    assert {type(error) for error in EXAMPLES} == set(tree())


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = re.findall(r"[├└]── (\w+)\s+(ZF\d+)?", errors.__doc__ or "")
    assert sorted(drawn) == sorted((cls.__name__, cls.__dict__.get("sqlstate") or "") for cls in tree())


@pytest.mark.parametrize("error", EXAMPLES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_arrives_in_another_process_as_it_was(error: FenceguardError, protocol: int) -> None:
    arrived = pickle.loads(pickle.dumps(error, protocol))
    assert (type(arrived), str(arrived), arrived.args, vars(arrived)) == (
        type(error),
        str(error),
        error.args,
        vars(error),
    )
    assert vars(error)


@pytest.mark.parametrize("error", EXAMPLES)
def test_an_error_copies(error: FenceguardError) -> None:
    for copied in (copy.copy(error), copy.deepcopy(error)):
        assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))


def test_an_error_raised_from_another_and_noted_pickles_with_its_notes() -> None:
    def fail() -> None:
        try:
            Path("/no/such/file").read_text()
        except OSError as cause:
            error = errors.LeaseLost("account:42", "missing")
            error.add_note("while renewing")
            raise error from cause

    with pytest.raises(errors.LeaseLost) as caught:
        fail()
    arrived = pickle.loads(pickle.dumps(caught.value))
    assert (str(arrived), arrived.__notes__, arrived.reason) == (str(caught.value), ["while renewing"], "missing")


def test_a_subclass_of_a_user_s_own_pickles_whatever_its_constructor_takes() -> None:
    arrived = pickle.loads(pickle.dumps(Own(owner="me")))
    assert (type(arrived), arrived.resource, arrived.owner) == (Own, "mine", "me")


class Own(errors.LeaseLost):
    def __init__(self, *, owner: str) -> None:
        super().__init__("mine", "released")
        self.owner = owner


# -- messages: what happened, to which thing, and what to do


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (EXAMPLES[0], ["'account:42' is held by 'worker-1'", "ends in 1.250 s"]),
        (
            errors.StaleToken("account:42", 7, 8, "public.account", {"id": 42}),
            [
                "write to public.account {'id': 42} for 'account:42' under token 7 was refused",
                "token 8 has claimed",
            ],
        ),
        (errors.StaleToken("account:42", 7, 8), ["write for 'account:42' under token 7", "do not retry"]),
        (errors.StaleToken("account:42", 7, 7), ["another owner has token 7 and has claimed it"]),
        (
            errors.UnfencedWrite("public.account"),
            ["public.account is enforced", "fenceguard.fence.unfenced(session, reason=...)"],
        ),
        (errors.NotClaimed("account:42", 7), ["token 7 for 'account:42'", "acquire the lease again"]),
        (
            errors.WrongResource("public.account", "account:43", ["account:42"]),
            ["belongs to 'account:43'", "announces ['account:42']"],
        ),
        (errors.WrongResource("public.account", None, []), ["names no valid resource"]),
        (errors.TransactionTooOld("account:42", 7), ["before token 7 for 'account:42'", "new transaction"]),
        (errors.TooManyResources(65, 64), ["announces 65 resources, at most 64"]),
        (errors.ClaimTimeout("account:42", 1.5, ["backend 17"]), ["within 1.500 s", "backend 17", "end them"]),
        (errors.ClaimTimeout("account:42", 1.5, []), ["nobody any more"]),
        (errors.OpenTransaction("account:42"), ["'account:42' is still open", "commit or roll it back"]),
        (errors.OutcomeUnknown(12345, "1"), ["transaction 12345 on timeline 1", "do not blindly repeat"]),
        (errors.SchemaMissing("it is missing", "run it"), ["it is missing; run it"]),
        (errors.TablesStillFenced(["a.b", "a.c"]), ["still fenced: a.b, a.c", "op.drop_fence"]),
        (errors.StoreUnreachable("redis", "refused"), ["redis gave no usable answer: refused"]),
    ],
)
def test_a_message_says_what_happened_and_what_to_do(error: FenceguardError, parts: list[str]) -> None:
    assert not [part for part in parts if part not in str(error)]


@pytest.mark.parametrize("reason", get_args(errors.LostReason))
def test_each_reason_of_a_loss_is_explained(reason: errors.LostReason) -> None:
    error = errors.LeaseLost("account:42", reason)
    assert str(error).startswith(f"the lease on 'account:42' is lost ({reason}): ")
    assert len(str(error)) > len(f"the lease on 'account:42' is lost ({reason}): ") + 20


def test_a_refused_row_s_key_is_a_copy() -> None:
    key = {"id": 42}
    error = errors.StaleToken("account:42", 7, 8, "public.account", key)
    key["id"] = 43
    assert error.key == {"id": 42}


# -- SQLSTATEs

DETAILS: dict[str, dict[str, Any]] = {
    "ZF001": {"resource": "account:42", "token": 7, "newest": 8},
    "ZF002": {"table": "public.account"},
    "ZF003": {"resource": "account:42", "token": 7},
    "ZF004": {"table": "public.account", "resource": None, "announced": ["account:42"]},
    "ZF005": {"resource": "account:42", "token": 7},
    "ZF006": {"count": 65, "limit": 64},
}


@pytest.mark.parametrize("sqlstate", DETAILS)
def test_a_refusal_of_postgres_becomes_the_error_with_its_facts(sqlstate: str) -> None:
    error = refusal(sqlstate, json.dumps(DETAILS[sqlstate]))
    assert error is not None
    assert type(error).sqlstate == error.sqlstate == sqlstate
    assert DETAILS[sqlstate].items() <= vars(error).items()


def test_a_refused_claim_also_names_the_newest_owner() -> None:
    error = refusal("ZF001", json.dumps({**DETAILS["ZF001"], "owner": "worker-2"}))
    assert isinstance(error, errors.StaleToken)
    assert error.owner == "worker-2"


def test_no_two_errors_share_a_sqlstate() -> None:
    codes = [cls.__dict__["sqlstate"] for cls in tree() if cls.__dict__.get("sqlstate")]
    assert sorted(codes) == sorted(DETAILS)
    assert errors.LeaseLost("r", "missing").sqlstate is None


@pytest.mark.parametrize("sqlstate", [None, "", "23505", "ZF999"])
def test_an_error_of_postgres_own_is_none_of_ours(sqlstate: str | None) -> None:
    assert refusal(sqlstate, "{}") is None


@pytest.mark.parametrize("detail", [None, "", "{}", "null", "[1]", "Key (id)=(42) exists.", '{"colour": "red"}'])
def test_somebody_else_s_error_under_our_code_is_none_of_ours(detail: str | None) -> None:
    assert refusal("ZF001", detail) is None
