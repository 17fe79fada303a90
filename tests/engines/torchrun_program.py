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


def driven(ranks: torchrun.Ranks, attributes: list[str]) -> dict[str, Any]:
    """What came of each: "honest", or "honest/1" on so many of the ranks."""
    engine, size = ranks.engine(), torchrun.world_size()
    told: dict[str, Any] = {"kinds": [], "left": [], "texts": [], "seconds": [], "stacks": []}
    for asked in attributes:
        attribute, _, fewer = asked.partition("/")
        of = int(fewer or size)
        case = TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(of), BatchLayout("contiguous", of))
        execution = engine.run(RunRequest(case, f"{ADAPTERS}:{attribute}"))
        failure = execution.failure
        told["left"] += execution.left
        told["kinds"].append(failure.kind if failure else [len(r.steps) for r in execution.ranks])
        told["texts"].append(failure.text if failure else "")
        told["seconds"].append(failure.seconds if failure else None)
        told["stacks"].append([bool(state.stack) for state in failure.ranks] if failure else [])
    try:
        engine.run(RunRequest(TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(size + 1)), f"{ADAPTERS}:honest"))
    except UsageError as error:
        told["refused"] = str(error)
    engine.close()
    engine.close()
    return told


if __name__ == "__main__":
    fork_server.fork()  # workers are forked from this process' own fork: torch is imported once a rank
    here = torchrun.Ranks()
    if torchrun.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(driven(here, sys.argv[2:])))
        here.leave(0)
    else:
        here.come()
        sys.exit(here.serve())
