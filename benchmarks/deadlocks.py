"""H4: from the last possible move to the report of a planted deadlock, on simulated ranks and on gloo processes."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.execution import RunRequest

_ADAPTER = "benchmarks.hanging_adapter:adapter"


def reports() -> Iterator[str]:
    """A line a world size, and the report of the smallest."""
    yield from _timed(SimulatedEngine(), (2, 8, 32))
    yield from _timed(ProcessesEngine(), (2, 4))


def _timed(engine: Engine, world_sizes: tuple[int, ...]) -> Iterator[str]:
    for world_size in world_sizes:
        step = StepSpec(normaliser=world_size)
        layout = BatchLayout("contiguous", world_size)
        case = TrainingCase(
            ModelSpec((LayerSpec(2),), features=2), MeshSpec(world_size), layout, step, Arithmetic(project=False)
        )
        failures = [engine.run(RunRequest(case, _ADAPTER)).failure for _ in range(5)]
        times = []
        for failure in failures:
            assert failure is not None
            assert failure.kind == "deadlock", failure.text
            times.append(failure.seconds or 0.0)
        worst, text = max(times), failures[0].text if failures[0] else ""
        kinds = {failure.kind for failure in failures if failure}
        yield f"{engine.name}, W = {world_size}: {', '.join(kinds)} in {worst * 1e3:.2f} ms (worst of 5)"
        if world_size == world_sizes[0]:
            yield text
    engine.close()
