"""The matrix of safety cases: which test shows which case, and which control shows the damage without the fence.

A test declares its case by a marker::

    @pytest.mark.case("frozen holder: update", control="test_control_a_frozen_holders_write_lands")

`control` names a test of the same module, or says ``"inside"`` when the test itself shows the damage, or
``"none: "`` and why there can be none. The run ends with the table.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "case(name, control): a line in the matrix of safety cases, see support.matrix"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("case"):
            (name,) = marker.args
            control: str = marker.kwargs["control"]
            module: Any = getattr(item, "module", None)
            if control != "inside" and not control.startswith("none: ") and not hasattr(module, control):
                raise pytest.UsageError(f"{item.nodeid}: its control {control!r} is no test of this module")
            item.user_properties.append(("case", [name, getattr(item, "originalname", item.name), control]))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    cases: dict[tuple[str, str, str], set[str]] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            for key, case in getattr(report, "user_properties", []):
                if key == "case" and (report.when == "call" or outcome != "passed"):
                    cases.setdefault(tuple(case), set()).add(outcome)
    if not cases:
        return
    terminalreporter.section("cases: what is shown -> by which test -> against which control")
    for (name, test, control), outcomes in sorted(cases.items()):
        verdict = "ok" if outcomes == {"passed"} else "FAILED"
        terminalreporter.line(f"{verdict:6} {name} -> {test} -> {control}")
