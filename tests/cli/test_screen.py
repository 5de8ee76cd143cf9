import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from fenceguard.cli._demo import screen
from fenceguard.cli._demo.story import Event, Outcome, Run, Story

MESSAGE = (
    'write to fenceguard_demo_1a2b3c.account for "account-1a2b3c:42" under token 1 refused: token 2 has claimed it'
)
TAKEN_OVER: list[tuple[float, str, str, dict[str, Any]]] = [
    (0.003, "A", "acquired", {"token": 1}),
    (0.021, "A", "read", {"balance": 100, "amount": 30}),
    (0.022, "A", "frozen", {}),
    (0.031, "B", "busy", {"retry_after": 0.98}),
    (1.0, "B", "acquired", {"token": 2}),
    (1.02, "B", "read", {"balance": 100, "amount": 50}),
    (1.03, "B", "committed", {"balance": 50}),
    (1.04, "B", "released", {}),
    (1.05, "A", "woken", {}),
]
REFUSED = (
    1.06,
    "A",
    "refused",
    {"sqlstate": "ZF001", "token": 1, "newest": 2, "message": MESSAGE, "hint": "Stop."},
)
LANDED = [(1.06, "A", "committed", {"balance": 70}), (1.07, "A", "lost", {})]


def outcome(run: Run, balance: int, *events: tuple[float, str, str, dict[str, Any]]) -> Outcome:
    return Outcome(run, [Event(*event) for event in (*TAKEN_OVER, *events)], balance)


SHOWN = Story(
    outcome("fence", 50, REFUSED),
    outcome("lease", 70, *LANDED),
    {"postgres": "a private Postgres", "redis": "a private Valkey"},
    3.9,
)


def printed(story: Story, *, width: int, terminal: bool) -> str:
    out = io.StringIO()
    colours = "standard" if terminal else "auto"
    console = Console(file=out, width=width, force_terminal=terminal, color_system=colours, highlight=False)
    screen.introduce(console)
    screen.show(console, story)
    return out.getvalue()


def words(text: str) -> str:
    """Return the words of a text, however its lines were broken."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 99, 100, 120, 200])
def test_no_line_is_longer_than_the_window_and_none_is_cut(width: int) -> None:
    text = printed(SHOWN, width=width, terminal=False)
    assert max(map(len, text.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert text.isascii()


def test_narrow_the_runs_stand_below_each_other_and_wide_beside_each_other() -> None:
    narrow, wide = (printed(SHOWN, width=width, terminal=False) for width in (99, 100))
    both = [line for line in wide.splitlines() if "With fenceguard" in line and "lease alone" in line]
    assert not [line for line in narrow.splitlines() if "With fenceguard" in line and "The same" in line]
    assert len(both) == 1


def test_the_timeline_tells_who_has_which_token_when() -> None:
    lines = printed(SHOWN, width=120, terminal=False).splitlines()
    begins = [line[:12].split() for line in lines if line[:4].replace(".", "").isdigit()]
    assert begins[:3] == [["0.00", "A", "#1"], ["0.02", "A", "#1"], ["0.02", "A", "#1"]]
    assert ["1.00", "B", "#2"] in begins
    assert begins[-1] == ["1.06", "-"]


def test_the_refusal_stands_there_in_the_servers_own_words() -> None:
    text = words(printed(SHOWN, width=80, terminal=False))
    assert f"ERROR: ZF001: {MESSAGE} HINT: Stop." in text
    assert "Postgres refuses A's UPDATE: its token is 1, and token 2 has claimed the account since" in text


def test_a_terminal_gets_colours_and_a_pipe_does_not() -> None:
    terminal, pipe = (printed(SHOWN, width=80, terminal=each) for each in (True, False))
    assert "\x1b[1;32m" in terminal
    assert "\x1b" not in pipe


def test_the_verdict_comes_last() -> None:
    text = words(printed(SHOWN, width=80, terminal=False))
    assert text.endswith(
        "SHOWN: with fenceguard Postgres refused the stale write and nothing was lost; with the lease alone a "
        "committed withdrawal of 50 was lost. Ran 3.9 s on a private Postgres and a private Valkey."
    )


def test_a_run_that_was_not_completed_shows_how_far_it_came_and_fails() -> None:
    broken = Outcome("lease", [Event(*TAKEN_OVER[0])], None, "worker A said nothing within 20 s")
    story = replace(SHOWN, lease=broken)
    text = words(printed(story, width=80, terminal=False))
    assert story.problems() == ["the run with the lease alone was not completed: worker A said nothing within 20 s"]
    assert "The run ended here: worker A said nothing within 20 s" in text
    assert "FAILED: the run with the lease alone was not completed" in text


@pytest.mark.parametrize(
    ("fence", "problems"),
    [
        (outcome("fence", 50, REFUSED), []),
        (
            outcome("fence", 70, *LANDED),
            ["the stale write was not refused", "a committed withdrawal of 50 was lost"],
        ),
        (outcome("fence", 100, REFUSED), ["a committed withdrawal of 50 was lost"]),
        (
            outcome("fence", 50, (1.06, "A", "refused", REFUSED[3] | {"sqlstate": "40001"})),
            ["SQLSTATE 40001, not ZF001"],
        ),
        (outcome("fence", 50, (1.06, "A", "refused", {"token": 1, "newest": 2})), ["SQLSTATE None, not ZF001"]),
    ],
)
def test_only_a_refusal_with_zf001_that_loses_nothing_counts(fence: Outcome, problems: list[str]) -> None:
    found = replace(SHOWN, fence=fence).problems()
    assert len(found) == len(problems)
    assert all(expected in problem for expected, problem in zip(problems, found, strict=True))
