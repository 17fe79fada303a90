"""What people do beside tests: a script (script.py) under gloo with DETAIL, and ``allclose`` at its defaults."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from tests.mechanisms.planting import Mechanism

_MODES: Final = {
    "fully_shard": "fully_shard", "opacus:sound": "ghost_fsdp", "opacus_ddp": "hooks", "opacus_ddp:ghost": "ghost",
}  # fmt: skip
"""Adapter -> the mode of the script that runs the same code."""
_ROOT: Final = Path(__file__).parents[2]


class Peers:
    """The process that runs the script, once for each line that it is sent."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.side_by_side.script"]
        self._process = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

        self._sound: set[str] = set()
        """Modes in which the script was seen to agree with one device where there is no fault."""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def ran(self, mode: str, fault: str, debug: str) -> dict[str, Any]:
        """What the script reports; a hang counts as raised."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(mode, debug, fault, file=self._process.stdin, flush=True)
        report: dict[str, Any] = json.loads(self._process.stdout.readline())
        return report

    def answers(self, fault: Mechanism) -> dict[str, dict[str, Any]]:
        """Of both arms. DETAIL changes no number, so that one run says both, unless it ends in an exception."""
        mode, started = _MODES[fault.adapter], time.monotonic()
        if mode not in self._sound:
            sound = self.ran(mode, "", "DETAIL")
            assert sound["close"], f"without a fault {mode} does not agree with one device: {sound}"
            self._sound.add(mode)
        detail = self.ran(mode, fault.name, "DETAIL")
        plain = self.ran(mode, fault.name, "OFF") if detail["raised"] else detail
        seconds = round(time.monotonic() - started, 1)
        return {
            "DETAIL": {**_row(detail, bool(detail["raised"])), "seconds": seconds},
            "allclose": {**_row(plain, not plain["close"]), "seconds": seconds},
        }


def _row(report: dict[str, Any], found: bool) -> dict[str, Any]:
    executed = bool(report["hits"] or report["raised"])
    answer = "found" if found else "missed" if executed else "not executed"
    return {"answer": answer, "by": "exception" if report["raised"] else "", "what": report["raised"]}
