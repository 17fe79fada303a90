"""Bounds: no path of a weighted backward pass rounds more often than its bound counts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck import adapters, oracle, strategies
from fsdpcheck.adapters.contract import FactorRule
from fsdpcheck.case import TrainingCase
from fsdpcheck.errors import NotExact
from fsdpcheck.exact.operators import LOGICAL, MOVES
from fsdpcheck.oracle import batched_step, bounds
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload import models, numerics

PRIVATE = ("conv", "group-norm", "rms-norm", "attention", "bags")
CASES = 80


class Roundings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts for each tensor the most roundings on a way to it from ``source``, by torch's operators alone."""

    def __init__(self, source: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts, self.alive = {id(source): 0}, [source]

    def of(self, tensor: Tensor) -> int:
        return self.counts.get(id(tensor), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = [self.counts[id(value)] for value in _tensors(args) if id(value) in self.counts]
        results = list(_tensors([result]))
        name = func.overloadpacket.__name__
        rounds = known and not (name in LOGICAL or func in MOVES)
        costs = _costs(name, args, results) if rounds else [0] * len(results)
        for tensor, cost in zip(results, costs, strict=True):
            if known:
                self.counts[id(tensor)] = max(known) + cost
                self.alive.append(tensor)
        return result


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _costs(name: str, args: Any, results: list[Tensor]) -> list[int]:
    """Most terms that an entry of each result adds up; elementwise operators round once for each operation in them."""
    if name in ("mm", "bmm"):
        return [args[0].shape[-1]]
    if name == "sum":
        return [args[0].numel() // max(results[0].numel(), 1)]
    if name == "convolution_backward":
        grad, _, weight = args[:3]
        positions = grad.numel() // grad.shape[1]
        found = dict(
            zip((0, 1, 2), (math.prod(weight.shape) // (weight.shape[1] * args[9]), positions, positions), strict=True)
        )
        return [found[place] for place, wanted in enumerate(args[10]) if wanted]
    if name in ("embedding_dense_backward", "_embedding_bag_dense_backward", "_embedding_bag_backward"):
        return [args[1].numel()]
    if name.endswith(("norm_backward", "xhat_backward")):
        row = _row(name, args)
        rest = args[0].numel()
        return [row + 5, *[rest // max(result.numel(), 1) for result in results[1:]]]
    if name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        return [args[0].shape[args[2]] + 2]
    return [{"add": 1, "add_": 1, "mul": 1, "div": 1}.get(name, 3)] * len(results)


def _row(name: str, args: Any) -> int:
    if name == "native_group_norm_backward":
        return int(args[1].numel() // args[5] // args[8])
    return int(math.prod(args[2])) if name == "native_layer_norm_backward" else int(args[2])


def roundings(case: TrainingCase) -> int:
    """The most that any path of the case's weighted backward passes meets, all samples of a step at once."""
    answer = oracle.answer(case, FactorRule(nested=True))
    model, most = models.build(case).double(), 0
    for step in answer.steps:
        batched_step.load(model, step)
        with numerics.of(case):
            losses = models.loss_for(case)(model(_inputs(case, step)), batched_step.data(case, step, _all(step))[1])
            weights = step.factors.double() * 0.7
            with Roundings(weights) as counted:
                trained = [p for p in model.parameters() if p.requires_grad]
                found = torch.autograd.grad(losses, trained, weights, allow_unused=True)
        most = max([most, *(counted.of(gradient) for gradient in found if gradient is not None)])
    return most


def _all(step: oracle.StepAnswer) -> range:
    return range(len(step.samples))


def _inputs(case: TrainingCase, step: oracle.StepAnswer) -> Tensor:
    return batched_step.data(case, step, _all(step))[0]


def test_no_path_rounds_more_often_than_the_bound_counts() -> None:
    features = adapters.load("reference").features
    private = frozenset(f"{name}-private" for name in PRIVATE)
    accepting = replace(features, accepts=features.accepts | private)
    seen: Counter[str] = Counter()
    for case in enumeration.distinct(strategies.cases_of(strategies.PRIVATE_EXACT, accepting, (1, 2)), CASES):
        try:
            counted = roundings(case)
        except NotExact:
            continue
        assert 0 < counted <= bounds._path_roundings(case), case.describe()
        seen.update(case.requires())
    assert all(seen[f"{name}-private"] >= 3 for name in PRIVATE), seen


def test_copies_of_a_probed_sample_are_exact_where_no_rounding_is_allowed_for() -> None:
    """Sums of W equal float32 numbers, one after the other and in pairs, against W times the number."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    space = strategies.PRIVATE_PROBE.but(replicated=True)
    probes = strategies.cases_of(space, adapters.load("reference").features, (2,))
    (probe,) = enumeration.distinct(probes.filter(lambda case: case.mesh.dp_replicate == 1), 1)
    assert (probe.layout.kind, probe.world_size) == ("replicated", 2)
    for world in (2, 4, 8, 16):
        total = values
        for _ in range(world - 1):
            total = total + values
        exact = bool((total == world * values).all())
        case = replace(probe, mesh=replace(probe.mesh, dp_shard=world))
        assert exact == (bounds.probe_roundings(case, 1) == 0)
