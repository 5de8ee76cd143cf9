"""Which tests a run has left out: for want of Debian's packages, or skipped, which in CI is a failure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

_LEFT_OUT = pytest.StashKey[int]()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    count = sum(item.get_closest_marker("debian") is not None for item in items)
    if items:
        stash = items[0].config.stash
        stash[_LEFT_OUT] = stash.get(_LEFT_OUT, 0) + count


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped_in_ci(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    count = terminalreporter.config.stash.get(_LEFT_OUT, 0)
    if count:
        terminalreporter.line(
            f"left out: {count} tests that need Debian packages; .ci/run installs them and runs these"
        )
    for report in _skipped_in_ci(terminalreporter.config):
        _, _, reason = report.longrepr
        terminalreporter.line(f"CI skips nothing, and this was skipped: {report.nodeid}: {reason}", red=True)


def _skipped_in_ci(config: pytest.Config) -> list[Any]:
    """Return the reports of skipped tests; none outside CI, nor in a worker of xdist: its controller has all."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return [] if reporter is None or not os.environ.get("CI") else reporter.stats.get("skipped", [])
