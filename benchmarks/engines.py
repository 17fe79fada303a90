"""H1-H3 and H5 of the goals: engine cases a second, and one rendezvous, against what a test author has today.

Of H2 and H3 also what no engine could pass: the peer's time over what the ranks take themselves, one after the other,
with calls that do nothing.

``Engine.run`` alone on a fixed set of cases (2 and 4 units, B = 8, 1 and 3 steps): no Hypothesis, no oracle, no checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.paired import Ratio, paired
from benchmarks.peers import FreeEngine, SpawnEngine, ThreadedGroupEngine
from fsdpcheck import process_state
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.engines.base import Engine
from fsdpcheck.execution import Execution, RankResult, RunRequest

_ALL_REDUCES = 200


def fixed_cases(world_size: int) -> list[TrainingCase]:
    """The published set: 2 and 4 units, 1 and 3 steps, batches of 8."""
    return [_case(world_size, units, steps) for units in (2, 4) for steps in (1, 3)]


def _case(world_size: int, units: int, steps: int) -> TrainingCase:
    layers = tuple(LayerSpec(4, bias=True, activation="relu") for _ in range(units))
    return TrainingCase(
        ModelSpec(layers, features=4, units=(1,) * units),
        MeshSpec(world_size),
        BatchLayout("contiguous", 8),
        StepSpec(steps=steps, normaliser=8),
    )


def engine_ratios(quick: bool = False) -> Iterator[Ratio]:
    """H2 (reference), H3 (fully_shard) and the cross ratio against torch's threaded group; H1 against mp.spawn."""
    with process_state.undisturbed():  # as the process that runs ranks has it
        yield from _engine_ratios(quick)


def _engine_ratios(quick: bool) -> Iterator[Ratio]:
    ours, threaded, free, spawn = InProcessEngine(), ThreadedGroupEngine(), FreeEngine(), SpawnEngine()
    for world_size in (2, 4, 8):
        requests = {name: _requests(world_size, name) for name in ("reference", "fully_shard")}
        for name, goal in (("reference", ">= 2 (H2)"), ("fully_shard", ">= 3 (H3)")):
            _equal_and_different(ours, threaded, requests[name])
            arms = partial(_run_all, ours, requests[name]), partial(_run_all, threaded, requests[name])
            yield paired(f"{name}, W = {world_size}, 4 cases: threaded group", *arms, goal)
            _as_many_steps(ours, free, requests[name])
            arms = partial(_run_all, free, requests[name]), arms[1]
            yield paired(f"{name}, W = {world_size}, 4 cases: an engine for nothing", *arms, "what H2, H3 can reach")
        mixed = partial(_run_all, ours, requests["reference"]), partial(_run_all, threaded, requests["fully_shard"])
        yield paired(f"ours reference / threaded fully_shard, W = {world_size}", *mixed, "about 20 (H2)")
    request = _requests(2, "reference")[:1]
    arms = partial(_run_all, ours, request), partial(_run_all, spawn, request)
    yield paired("reference, W = 2, 1 case: mp.spawn gloo", *arms, ">= 1000 (H1)", pairs=3 if quick else 5)
    ours.close()


def ratios() -> Iterator[Ratio]:
    """Both groups."""
    yield from rendezvous_ratios()
    yield from engine_ratios()


def rendezvous_ratios() -> Iterator[Ratio]:
    """H5: one all_reduce, fingerprint and trace on, against the threaded group."""
    for world_size in (4, 16):
        request = _requests(world_size, "reference")[0]
        ours, threaded = InProcessEngine(program=_all_reduces), ThreadedGroupEngine(_all_reduces)
        _same_sums(ours.run(request), threaded.run(request))
        arms = partial(_must_run, ours, request), partial(_must_run, threaded, request)
        yield paired(f"{_ALL_REDUCES} all_reduce, W = {world_size}: threaded group", *arms, ">= 2 (H5)")
        ours.close()


def _all_reduces(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    value = torch.zeros(3)
    for _ in range(_ALL_REDUCES):
        value.add_(1)
        dist.all_reduce(value)
        value.div_(dist.get_world_size())
    result.initial["value"] = value


def _requests(world_size: int, adapter: str) -> list[RunRequest]:
    return [RunRequest(case, adapter) for case in fixed_cases(world_size)]


def _run_all(engine: Engine, requests: list[RunRequest]) -> None:
    for request in requests:
        _must_run(engine, request)


def _must_run(engine: Engine, request: RunRequest) -> Execution:
    execution = engine.run(request)
    if execution.failure is not None:
        raise RuntimeError(f"{engine.name}: {execution.failure.text}")
    return execution


def _equal_and_different(ours: Engine, peer: Engine, requests: list[RunRequest]) -> None:
    """Both arms give the same bits, and they are not the same arm: one has a trace, the other a backend of its own."""
    for request in requests:
        mine, theirs = _must_run(ours, request), _must_run(peer, request)
        for one, other in zip(mine.ranks, theirs.ranks, strict=True):
            for step, record in enumerate(one.steps):
                equal = all(torch.equal(value, other.steps[step].params[name]) for name, value in record.params.items())
                assert equal, f"the arms differ at step {step} of {request.case}"
            assert one.trace or request.case.world_size == 1
            assert not other.trace
            assert other.observations == [("backend", "end", 0, "threaded")]


def _as_many_steps(ours: Engine, free: Engine, requests: list[RunRequest]) -> None:
    """Ranks of both take the same steps and record the same names of each; values differ, for nothing was exchanged."""
    for request in requests:
        mine, alone = _must_run(ours, request), _must_run(free, request)
        found = [[[[*step.params] for step in rank.steps] for rank in run.ranks] for run in (mine, alone)]
        assert found[0] == found[1], f"a rank alone does something else in {request.case}"


def _same_sums(mine: Execution, theirs: Execution) -> None:
    assert torch.equal(mine.ranks[0].initial["value"], theirs.ranks[0].initial["value"])
    assert len(mine.ranks[0].trace) == _ALL_REDUCES
