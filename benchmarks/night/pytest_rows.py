"""A pytest plugin: a JSON line for each test in the file of ``--night-rows``: id, outcome, seconds.

And cases, where a test says how many it has judged: ``record_property("cases", N)``.
"""

from __future__ import annotations

import json
from typing import Any

_RANK = {"passed": 0, "skipped": 1, "failed": 2}


class _Rows:
    def __init__(self, path: str) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._outcome: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """The worst of setup, call and teardown counts."""
        name, worst = report.nodeid, self._outcome.get(report.nodeid, "passed")
        self._outcome[name] = max(worst, report.outcome, key=_RANK.__getitem__)
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.when == "teardown":
            row = {"id": name, "outcome": self._outcome[name], "seconds": self._seconds[name]}
            row |= {what: told for what, told in report.user_properties if what == "cases"}
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--night-rows", metavar="FILE", help="a line for each test")


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(_Rows(config.getoption("--night-rows")))
