"""How the demo looks: two timelines beside each other, below each other when the window is narrow.

Text is ASCII, and nothing but text when stdout is no terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fenceguard.cli._demo.story import AMOUNTS, START, TTL, Event, Outcome, Story

WIDE: Final = 100
"""Columns from which on the two runs stand beside each other."""

INTRODUCTION: Final = (
    f"Workers A and B withdraw money from one account under a lease in Redis ({TTL:g} s); A is frozen between "
    "BEGIN and its write until its lease has run out and B has taken over, then wakes and writes. With fenceguard "
    "Postgres refuses A's late write, because a newer token has claimed the account; with the lease alone it lands "
    "and wipes out B's withdrawal."
)
_TITLES: Final = {"fence": "With fenceguard", "lease": "The same with the lease alone"}
_HEAD: Final = ("time", "lease", "what happens")


def introduce(console: Console) -> None:
    """Say what will be shown."""
    _print(console, Group(Text(INTRODUCTION), ""))


def show(console: Console, story: Story) -> None:
    """Print both timelines and the verdict."""
    fence, lease = (_timeline(console, outcome) for outcome in (story.fence, story.lease))
    if console.width >= WIDE:
        beside = Table.grid(expand=True, padding=(0, 0 if console.is_terminal else 3, 0, 0))
        beside.add_column(ratio=1)
        beside.add_column(ratio=1)
        beside.add_row(fence, lease)
        _print(console, beside)
    else:
        _print(console, Group(fence, "", lease))
    _print(console, Group("", *_verdict(story)))


def _print(console: Console, what: RenderableType) -> None:
    """Print; to a pipe without the blanks by which a table fills its lines."""
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as printed:
        console.print(what)
    for line in printed.get().splitlines():
        console.out(line.rstrip(), highlight=False)


def _timeline(console: Console, outcome: Outcome) -> RenderableType:
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True, style="dim")
    rows.add_column(no_wrap=True, style="cyan")
    rows.add_column(overflow="fold")
    rows.add_row(*(Text(word, style="dim") for word in _HEAD))
    holder = "-"
    for event in outcome.events:
        holder = _holder(event, holder)
        rows.add_row(f"{event.at:4.2f}", holder, Group(*_told(outcome, event)))
    rows.add_row("", "", _ending(outcome))
    title = _TITLES[outcome.run]
    if console.is_terminal:
        bad = outcome.problem is not None or outcome.missing_money
        return Panel(rows, title=title, box=ROUNDED, border_style="red" if bad else "green")
    return Group(title, "-" * len(title), rows)


def _holder(event: Event, before: str) -> str:
    """Return who has the lease, and under which token, after `event`."""
    if event.what == "acquired":
        return f"{event.who} #{event.facts['token']}"
    return "-" if event.what == "released" else before


def _told(outcome: Outcome, event: Event) -> Iterator[Text]:
    """Tell an event in a sentence, and what Postgres said in its own words."""
    facts = event.facts
    if event.what == "refused":
        yield Text(
            f"Postgres refuses {event.who}'s UPDATE: its token is {facts['token']}, and token {facts['newest']} "
            "has claimed the account since",
            style="bold green",
        )
        yield Text(f"ERROR: {facts.get('sqlstate')}: {facts.get('message')}", style="green")
        for part in ("detail", "hint"):
            if facts.get(part):
                yield Text(f"{part.upper()}: {facts[part]}", style="green")
    else:
        stale = (event.who, event.what) == ("A", "committed")
        yield Text(f"{event.who} {_did(outcome, event)}", style="bold red" if stale else "")


_DEEDS: Final = {
    "acquired": "takes the lease: token {token}",
    "read": "begins a transaction, reads balance {balance}, wants to withdraw {amount}",
    "frozen": "is frozen (SIGSTOP), as by a long pause",
    "busy": "wants the lease, A has it for another {retry_after:.2f} s: waits",
    "woken": f"wakes (SIGCONT), has noticed nothing, writes balance {START - AMOUNTS['A']}",
    "committed": "writes balance {balance} and commits",
    "lost": "learns that its lease was lost: too late",
    "released": "gives the lease back",
}


def _did(outcome: Outcome, event: Event) -> str:
    deed = _DEEDS[event.what]
    if event.what == "acquired":
        if event.who == "B":
            deed = deed.replace("the lease", "the lease, A's has run out")
        if outcome.run == "fence":
            deed += ", claims the account with it in Postgres"
    elif (event.who, event.what) == ("A", "committed"):
        deed = "commits: nothing compares tokens, the stale balance {balance} lands"
    return deed.format(**event.facts)


def _ending(outcome: Outcome) -> Text:
    if outcome.problem is not None:
        return Text(f"The run ended here: {outcome.problem}", style="bold red")
    if outcome.missing_money:
        told = f"Balance {outcome.balance}: a committed withdrawal of {outcome.missing_money} is lost"
        return Text(told, style="bold red")
    return Text(f"Balance {outcome.balance}: every committed withdrawal is in it", style="bold green")


def _verdict(story: Story) -> Iterator[Text]:
    problems = story.problems()
    for problem in problems:
        yield Text(f"FAILED: {problem}", style="bold red")
    if not problems:
        yield Text(
            "SHOWN: with fenceguard Postgres refused the stale write and nothing was lost; with the lease alone a "
            f"committed withdrawal of {story.lease.missing_money} was lost.",
            style="bold",
        )
    yield Text(
        f"Ran {story.seconds:.1f} s on {story.servers['postgres']} and {story.servers['redis']}.", style="dim"
    )
