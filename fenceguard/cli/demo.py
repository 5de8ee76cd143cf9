"""`fenceguard demo`: a frozen holder's late write, refused by Postgres, beside the same run without the fence."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from time import monotonic

from rich.console import Console

from fenceguard import embedded
from fenceguard.cli._demo import screen
from fenceguard.cli._demo.crew import Worker, crew
from fenceguard.cli._demo.play import play
from fenceguard.cli._demo.stage import Stage, stage
from fenceguard.cli._demo.story import RUNS, Outcome, Story
from fenceguard.cli._output import say_json
from fenceguard.cli._settings import Store, Url, UsageError, find, parse
from fenceguard.cli._signals import ended_by_signals


def main(*, postgres: str | None, redis: str | None, as_json: bool) -> int:
    """Play the demo and print it; returns the exit code.

    Raises:
        UsageError: a URL is malformed, or its driver is of no use here.
        FenceguardError: the servers could not be started or used; what had been put up is taken down again.
    """
    given = (find("postgres", postgres), find("redis", redis))
    _check_driver(given[0])
    console = Console(highlight=False)
    if not as_json:
        screen.introduce(console)
    with ended_by_signals():
        story = _perform(*given)
    if as_json:
        say_json(story.as_json())
    else:
        screen.show(console, story)
    return 1 if story.problems() else 0


def _check_driver(postgres: Url | None) -> None:
    if find_spec("psycopg") is None:
        raise UsageError("the demo's workers need psycopg; run: pip install 'fenceguard[all]'")
    if postgres is not None and postgres.driver not in {"", "psycopg"}:
        raise UsageError(
            f"the demo's workers use psycopg, and the postgres URL from {postgres.source} asks for "
            f"{postgres.driver}: give it as postgresql://"
        )


def _perform(postgres: Url | None, redis: Url | None) -> Story:
    began_at = monotonic()
    # The workers come first: they import while the servers start.
    with crew(len(RUNS)) as workers, _servers(postgres, redis) as servers, stage(*servers) as built:
        fence, lease = _play(built, workers)
        shown: dict[str, str] = {url.store: url.shown for url in servers}
    return Story(fence, lease, shown, monotonic() - began_at)


def _play(built: Stage, workers: list[tuple[Worker, Worker]]) -> list[Outcome]:
    """Play both runs at the same time."""
    with ThreadPoolExecutor(len(RUNS)) as pool:
        plays = [pool.submit(play, run, *pair, built) for run, pair in zip(RUNS, workers, strict=True)]
        try:
            outcomes = [each.result() for each in plays]
        finally:
            # Before the pool waits for its threads, which may be listening to a worker, and before the stage is
            # cleared, which a worker's open transaction would hold up.
            for worker in (worker for pair in workers for worker in pair):
                worker.end()
    for outcome in outcomes:
        if outcome.problem is None:
            outcome.balance = built.balance(outcome.run)
    return outcomes


@contextmanager
def _servers(postgres: Url | None, redis: Url | None) -> Generator[tuple[Url, Url]]:
    """Yield the given servers, and private ones in place of what is not given."""
    with ExitStack() as stack:
        if postgres is None and redis is None:
            pair = stack.enter_context(embedded.pair())  # side by side, which is quicker
            yield _private(pair.postgres.url, "postgres"), _private(pair.valkey.url, "redis")
            return
        yield (
            postgres or _private(stack.enter_context(embedded.postgres()).url, "postgres"),
            redis or _private(stack.enter_context(embedded.valkey()).url, "redis"),
        )


def _private(url: str, store: Store) -> Url:
    kind = "Postgres" if store == "postgres" else "Valkey"
    return replace(parse(store, url, source="its launcher"), shown=f"a private {kind}")
