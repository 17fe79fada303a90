"""Supervision: the session runs in a child, so a crash of simulated ranks is a finding and not the end of the run.

This process imports neither torch nor hypothesis. It reads the child's events; when the child dies it says which case
was running, keeps every finding, and starts a new child for what is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fsdpcheck.errors import INTERNAL, USAGE, FsdpcheckError, UsageError
from fsdpcheck.ledger import Ledger, lost
from fsdpcheck.plan import Plan
from fsdpcheck.replay import decode
from fsdpcheck.verdict import Verdict

_STDERR = 2
_BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from fsdpcheck.worker import {main}
sys.exit({main}())"""
# Not ``-m``, which looks in the working folder first: in a checkout it would run another copy than the installed one.

Listen = Callable[[Ledger, Mapping[str, Any]], None]


def supervise(plan: Plan, listen: Listen) -> Ledger:
    """Run ``plan`` in children until it is done; ``listen(ledger, event)`` hears every event after the ledger."""
    ledger = Ledger(plan)
    with _Child.forwarding_interrupts() as state:
        while not ledger.ended and not ledger.errors:
            code = _one_child(plan, ledger, listen, state)
            if ledger.ended:
                break
            if state.interrupted:
                ledger.take({"event": "end", "interrupted": True})
            elif not ledger.lose(_death(code)):
                text = f"the checking process died outside any case: {_death(code)}"
                ledger.take({"event": "error", "text": text, "exit_code": INTERNAL})
            else:
                listen(ledger, {"event": "verdict", **list(ledger.verdicts.values())[-1].to_data()})
    return ledger


def replayed(token: str, engine: str, budget: float | None) -> Verdict:
    """The verdict on a trusted token's one case, run in a child: a crash of its ranks is a finding.

    Raises UsageError, or FsdpcheckError for what went wrong in the child.
    """
    verdicts: list[Verdict] = []
    with _Child.forwarding_interrupts() as state:
        arguments = [token, engine, json.dumps(budget)]
        for event in _events(state, "replay", arguments):
            if event["event"] == "error":
                raise (UsageError if event["exit_code"] == USAGE else FsdpcheckError)(event["text"])
            verdicts.append(Verdict.from_data({name: event[name] for name in event if name != "event"}))
        assert state.process is not None
        code = state.process.wait()
    if state.interrupted:
        raise KeyboardInterrupt
    return verdicts[0] if verdicts else lost(decode(token), engine, _death(code))


class _Child:
    """The child that is running now, and whether the user asked to stop."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.interrupted = False

    def interrupt(self, number: int, frame: object) -> None:
        """First time: ask the child to clean up and end. Second time: end it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL if self.interrupted else signal.SIGINT)
        self.interrupted = True

    @staticmethod
    @contextmanager
    def forwarding_interrupts() -> Iterator[_Child]:
        state = _Child()
        kept = {number: signal.signal(number, state.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield state
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)


def _one_child(plan: Plan, ledger: Ledger, listen: Listen, state: _Child) -> int:
    """Start a child on what is left and take its events until its pipe ends; returns its exit code."""
    for event in _events(state, "main", [plan.to_json(), json.dumps(list(ledger.verdicts))]):
        ledger.take(event)
        listen(ledger, event)
    assert state.process is not None
    return state.process.wait()


def _events(state: _Child, main: str, arguments: list[str]) -> Iterator[dict[str, Any]]:
    """Start a child that runs ``worker.<main>`` and give its events until its pipe ends."""
    read, write = os.pipe()
    state.process = subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT.format(main=main), str(write), *arguments, json.dumps(sys.path)],
        pass_fds=[write],
        stdout=_STDERR,  # what an implementation prints is not our answer
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        for line in pipe:
            if line.endswith("\n"):  # the last line of a child that died may be half a line
                yield json.loads(line)


def _death(code: int) -> str:
    if code >= 0:
        return f"it exited with code {code} (os._exit, or a library that ends the process)"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"
