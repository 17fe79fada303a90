"""A plugin of pytest that asks somebody else's tests about faults. They are collected once; all runs are forks of that.

The variable SIDE_BY_SIDE holds a ``Plan`` in JSON. Each line that is written to its file is a row of the record, less
its arm and commit. What own_tests.py says of how tests are counted is done here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

VARIABLE: Final = "SIDE_BY_SIDE"
NO_FAULT: Final = "(none)"
_AROUND: Final = 30.0
"""Seconds beyond five times those without a fault, after which a test hangs."""
Rows = list[dict[str, Any]]


class TookTooLong(BaseException):
    """No Exception, so that no test catches it."""


@dataclass(frozen=True)
class Plan:
    """``faults``: what to plant, one after the other. ``baseline``: the row without a fault; {} to run that first.

    ``limit``: seconds of a test without a fault.
    """

    side: str
    file: str
    limit: float
    faults: list[str] = field(default_factory=list)
    baseline: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def pytest_configure(config: pytest.Config) -> None:
    plan = Plan(**json.loads(os.environ[VARIABLE]))
    if plan.side == "fully_shard":
        _processes_are_forked()
    config.pluginmanager.register(_Asking(plan))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Whatever a test has left running is not waited for."""
    os._exit(0)


class _Asking:
    def __init__(self, plan: Plan) -> None:
        self._plan, self._items = plan, dict[str, pytest.Item]()
        self._run = _Run("", {}, 0.0)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        baseline = self._plan.baseline
        if not baseline:
            baseline = {"fault": NO_FAULT, **summed(self._forked("", [*self._items], {}))}
            self._write(baseline)
        for fault in self._plan.faults:
            self._write({"fault": fault, **self._answer(fault, baseline)})
        return True

    def _write(self, row: dict[str, Any]) -> None:
        with Path(self._plan.file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _answer(self, fault: str, baseline: dict[str, Any]) -> dict[str, Any]:
        """Found and by which test, missed, or not executed; the quickest tests run first."""
        started, passed = time.monotonic(), baseline["passed"]
        seconds = dict(zip(passed, baseline["seconds"], strict=True))
        left = sorted((passed[n] for n in baseline["executed"].get(fault, [])), key=seconds.__getitem__)
        limits = {test: _AROUND + 5 * seconds[test] for test in left}
        found, unsteady, executing = ("", ""), list[str](), len(left)
        while left and not found[0]:
            failing = self._failing(fault, left, limits)
            if failing is None:
                break
            test = failing[0]
            if self._failing("", [test], limits) is None and self._failing(fault, [test], limits) is not None:
                found = failing
            else:
                unsteady.append(test)
            left = left[left.index(test) + 1 :]
        return {
            "answer": "found" if found[0] else "missed" if executing else "not executed", "by": found[0],
            "what": found[1], "executing": executing, "unsteady": unsteady,
            "seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip

    def _failing(self, fault: str, tests: Sequence[str], limits: Mapping[str, float]) -> tuple[str, str] | None:
        """The first of the tests that does not pass, and why; where the process ends, the one that it was in."""
        outcomes = {row["test"]: row for row in self._forked(fault, tests, limits, stops=True) if "outcome" in row}
        for test in tests:
            if test not in outcomes:
                return test, "the process ended"
            if outcomes[test]["outcome"] != "passed":
                return test, outcomes[test]["why"] or outcomes[test]["outcome"]
        return None

    def _forked(self, fault: str, tests: Sequence[str], limits: Mapping[str, float], stops: bool = False) -> Rows:
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/rows"
            process = multiprocessing.get_context("fork").Process(
                target=self._all, args=(file, fault, tests, limits, stops)
            )
            process.start()
            process.join(sum(limits.get(test, self._plan.limit) for test in tests) + _AROUND)
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return [json.loads(line) for line in Path(file).read_text().splitlines()] if Path(file).exists() else []

    def _all(self, file: str, fault: str, tests: Sequence[str], limits: Mapping[str, float], stops: bool) -> None:
        os.setsid()
        self._run = _Run(file, limits, self._plan.limit)
        with self._planted(fault):
            for test, behind in zip(tests, [*tests[1:], None], strict=True):
                following = None if behind is None else self._items[behind]
                self._run.begin(test)
                self._items[test].config.hook.pytest_runtest_protocol(item=self._items[test], nextitem=following)
                if self._run.end() != "passed" and stops:
                    break
        os._exit(0)

    def _planted(self, fault: str) -> AbstractContextManager[object]:
        from benchmarks.side_by_side.changes import probed
        from benchmarks.side_by_side.faults import ALL

        return ALL[fault]() if fault else probed(
            [one for one in ALL.values() if one.subject == self._plan.side], self._run.hit
        )  # fmt: skip

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        signal.signal(signal.SIGALRM, _give_up)
        signal.setitimer(signal.ITIMER_REAL, self._run.limit)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        if isinstance(call.excinfo.value, TookTooLong):
            self._run.outcome = ("too slow", "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self._run.outcome[0] == "passed":
            why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr).strip()
            self._run.outcome = (report.outcome, " ".join(why.splitlines()[-1:]))


class _Run:
    """Tests of one process and of those that it forks: their rows, in a file."""

    def __init__(self, file: str, limits: Mapping[str, float], limit: float) -> None:
        self._file, self._limits, self._limit = file, limits, limit
        self._told, self._test, self._started = set[tuple[int, str, str]](), "", 0.0
        self.outcome = ("passed", "")

    @property
    def limit(self) -> float:
        return self._limits.get(self._test, self._limit)

    def begin(self, test: str) -> None:
        self._test, self._started, self.outcome = test, time.monotonic(), ("passed", "")

    def end(self) -> str:
        outcome, why = self.outcome
        seconds = round(time.monotonic() - self._started, 2)
        self._write({"test": self._test, "outcome": outcome, "seconds": seconds, "why": why[:200]})
        return outcome

    def hit(self, fault: str) -> None:
        key = (os.getpid(), self._test, fault)
        if key not in self._told:
            self._told.add(key)
            self._write({"test": self._test, "hit": fault})

    def _write(self, row: dict[str, Any]) -> None:
        file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{json.dumps(row)}\n".encode())
        os.close(file)


def summed(rows: Rows) -> dict[str, Any]:
    """A row of the record: tests by what they came to; "executed": fault -> places in the list of those that pass."""
    outcomes = {row["test"]: row for row in rows if "outcome" in row}
    passed = [test for test, row in outcomes.items() if row["outcome"] == "passed"]
    place = {test: number for number, test in enumerate(passed)}
    executed, skipped = defaultdict[str, set[int]](set), defaultdict[str, list[str]](list)
    for row in rows:
        if "hit" in row and row["test"] in place:
            executed[row["hit"]].add(place[row["test"]])
    for test, row in outcomes.items():
        if row["outcome"] == "skipped":
            skipped[row["why"].removeprefix("Skipped: ")].append(test)
    return {
        "passed": passed, "seconds": [outcomes[test]["seconds"] for test in passed], "skipped": dict(skipped),
        "failed": {test: row["why"] for test, row in outcomes.items() if row["outcome"] == "failed"},
        "too slow": [test for test, row in outcomes.items() if row["outcome"] == "too slow"],
        "executed": {fault: sorted(places) for fault, places in sorted(executed.items())},
    }  # fmt: skip


def _give_up(*_: object) -> None:
    for child in multiprocessing.active_children():
        child.kill()
    raise TookTooLong


def _processes_are_forked() -> None:
    """PyTorch's tests on several processes fork, so that a fault is in place there, and torch is not loaded again.

    ``FSDPTest._run`` of the release leaves out every such test where there is no accelerator, also those that are
    marked as fit for a CPU. The class that it inherits from has the same function without that.
    """
    import torch
    from torch.testing._internal import common_distributed, common_fsdp

    def forked(self: Any) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    common_distributed.MultiProcessTestCase._spawn_processes = forked  # type: ignore[method-assign]
    if "_run" in vars(common_fsdp.FSDPTest):
        del common_fsdp.FSDPTest._run
