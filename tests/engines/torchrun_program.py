"""Run under torchrun by test_torchrun: rank 0 drives a few requests and writes what came of them as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines import torchrun
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import RunRequest
from fsdpcheck.processes import fork_server

ADAPTERS = Path(__file__).with_name("adapters_for_tests.py")


def driven(attributes: list[str]) -> dict[str, Any]:
    engine, size = torchrun.TorchrunEngine(), torchrun.world_size()
    case = TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(size), BatchLayout("contiguous", size))
    told: dict[str, Any] = {"kinds": [], "left": []}
    for attribute in attributes:
        execution = engine.run(RunRequest(case, f"{ADAPTERS}:{attribute}"))
        told["left"] += execution.left
        told["kinds"].append(execution.failure.kind if execution.failure else [len(r.steps) for r in execution.ranks])
    try:
        engine.run(RunRequest(TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(size + 1)), f"{ADAPTERS}:honest"))
    except UsageError as error:
        told["refused"] = str(error)
    engine.close()
    engine.close()
    return told


if __name__ == "__main__":
    fork_server.fork()  # workers are forked from this process' own fork: torch is imported once a rank
    if torchrun.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(driven(sys.argv[2:])))
    else:
        torchrun.serve()
