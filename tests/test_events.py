"""Events are values; the default listener logs them."""

from __future__ import annotations

import logging
import pickle

import pytest

from fenceguard import events

EXAMPLES: list[tuple[events.Event, int, str]] = [
    (
        events.Acquired("account:42", 7, waited=0.5),
        logging.DEBUG,
        "Acquired resource='account:42' token=7 waited=0.5",
    ),
    (events.Renewed("account:42", 7, gap=10.0), logging.DEBUG, "Renewed resource='account:42' token=7 gap=10.0"),
    (
        events.Lost("account:42", 7, reason="missing"),
        logging.ERROR,
        "Lost resource='account:42' token=7 reason='missing'",
    ),
    (
        events.Claimed("account:42", 7, waited=0.1),
        logging.DEBUG,
        "Claimed resource='account:42' token=7 waited=0.1",
    ),
    (events.Lifted("account:42", 8, refused=1), logging.WARNING, "Lifted resource='account:42' token=8 refused=1"),
    (
        events.Refused("account:42", 7, newest=8, table="public.account"),
        logging.ERROR,
        "Refused resource='account:42' token=7 newest=8 table='public.account'",
    ),
    (events.Released("account:42", 7, held=3.0), logging.DEBUG, "Released resource='account:42' token=7 held=3.0"),
    (
        events.Outlived("account:42", 7, bound=30.0),
        logging.WARNING,
        "Outlived resource='account:42' token=7 bound=30.0",
    ),
    (
        events.ExpiredLate("account:42", 7, late=0.2),
        logging.WARNING,
        "ExpiredLate resource='account:42' token=7 late=0.2",
    ),
]


def test_every_event_has_an_example_here() -> None:
    classes = {
        value for value in vars(events).values() if isinstance(value, type) and issubclass(value, events.Event)
    }
    assert {type(event) for event, _, _ in EXAMPLES} == classes - {events.Event}


@pytest.mark.parametrize(("event", "level", "text"), EXAMPLES)
def test_an_event_is_logged_with_its_members(
    event: events.Event, level: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "fenceguard"):
        events.log(event)
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == ("fenceguard", level, text)
    assert record.__dict__["fenceguard"]["resource"] == "account:42"


@pytest.mark.parametrize("event", [event for event, _, _ in EXAMPLES])
def test_an_event_pickles_and_compares_by_value(event: events.Event) -> None:
    assert pickle.loads(pickle.dumps(event)) == event
