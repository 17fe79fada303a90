"""Other CPUs, emulated: are verdicts and tokens the same whatever instructions torch and MKL take?

``python -m benchmarks cpus [LAWS [ADAPTERS]]``: runs the laws in processes whose environment limits torch's kernels
(ATEN_CPU_CAPABILITY) and MKL's code paths (MKL_CBWR), honest adapters and one planted fault, and compares what each
says with what the CPU says as it is: status, cases, rejected, labels, and of findings the token and every word.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

CPUS: Final[dict[str, dict[str, str]]] = {
    "as it is": {},
    "torch without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "torch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "MKL for any CPU": {"MKL_CBWR": "COMPATIBLE"},
    "MKL with AVX2": {"MKL_CBWR": "AVX2"},
    "both for any CPU": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
}
FAULT: Final = "averaged_twice"


def lines(laws: str = "*", adapters: str = "reference,fully_shard") -> Iterator[str]:
    """A line a CPU: verdicts that are the first one's, and each that is not."""
    first: dict[str, Any] | None = None
    for cpu, environment in CPUS.items():
        said = {
            **_said(environment, laws, adapters.split(","), []),
            **{f"{name} with {FAULT}": what for name, what in _said(environment, laws, ["reference"], [FAULT]).items()},
        }
        first = first or said
        others = [name for name in first.keys() | said.keys() if first.get(name) != said.get(name)]
        found = sum(what["finding"] is not None for what in said.values())
        yield f"{cpu}: {len(said) - len(others)} of {len(said)} verdicts equal, {found} findings among them"
        for name in sorted(others):
            yield f"  {name}:\n    {first.get(name)}\n    {said.get(name)}"


def _said(environment: dict[str, str], laws: str, adapters: list[str], installs: list[str]) -> dict[str, Any]:
    """What one session says, by law and adapter, without the time that it took."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = [f"--adapter={name}" for name in adapters] + [f"--install={name}" for name in installs]
        command = [sys.executable, "-m", "fsdpcheck", "run", "--law", laws, "--json", str(report), *options]
        subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=False)
        data = json.loads(report.read_text(encoding="utf-8"))
    return {f"{one['law']} on {one['adapter']}": {**one, "seconds": 0} for one in data["verdicts"]}
