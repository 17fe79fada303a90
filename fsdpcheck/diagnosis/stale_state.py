"""Causes in stale state: gradients of old parameters, norms of an earlier batch, state of an earlier run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis import shards
from fsdpcheck.diagnosis.cause_fit import rounding
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import Cause, Causes
from fsdpcheck.oracle import INSTRUMENT, Answer, Named
from fsdpcheck.workload import batches, models, numerics


def gradients(answer: Answer, step: int) -> Iterator[tuple[Cause, Named]]:
    """Released gradients (float64) of step >= 1 computed with parameters that are a step, or all steps, old."""
    now = answer.steps[step].before
    sources = [("the first step", answer.steps[0].before)]
    sources += [("the step before", answer.steps[step - 1].before)] if step > 1 else []
    for when, old in sources if step else ():
        for key, text, mixed in _mixtures(answer.case, now, old, answer.trainable):
            if any(bool((mixed[name] != now[name]).any()) for name in now):
                yield (
                    Cause(f"stale: {key}", f"the gradient is that of {when}'s parameters{text}"),
                    at(answer, step, mixed),
                )


def norms(case: TrainingCase, step: int, mine: Sequence[Tensor]) -> Iterator[tuple[Cause, Tensor]]:
    """Norms [b] of ``step`` that are those of the micro-batch before; ``mine`` one rank's right norms by step."""
    sizes = [len(chunk) for chunk in batches.indices(case, 0)[0]]
    for rank_chunks in batches.indices(case, step):
        if sum(map(len, rank_chunks)) == len(mine[step]):
            sizes = [len(chunk) for chunk in rank_chunks]
            break
    pieces = [piece for own in mine[: step + 1] for piece in torch.split(own, sizes)]
    first = step * len(sizes)
    before = [pieces[i - 1] if i else pieces[i] for i in range(first, first + len(sizes))]
    now = pieces[first:]
    found = [old if len(old) == len(new) else new for old, new in zip(before, now, strict=True)]
    text = "the norms of the micro-batch before are used again: stale"
    if any(not torch.equal(a, b) for a, b in zip(found, now, strict=True)):
        yield Cause("stale norms", text), torch.cat(found)


def repeated(first: Execution, second: Execution) -> Causes:
    """Causes of two runs of one case that differ: nothing where they differ by rounding alone."""
    text = "state of an earlier training outlives it and is found by the next: look for counters, caches, buffers"
    for one, two in zip(first.ranks, second.ranks, strict=True):
        for a, b in zip(one.steps, two.steps, strict=True):
            for mine, theirs in ((a.grads, b.grads), (a.params, b.params)):
                for name, value in (mine or {}).items():
                    other = (theirs or {}).get(name)
                    room = rounding(first.request.training, value.abs().max()) if value.numel() else value
                    if other is not None and bool(((value.double() - other.double()).abs() > room).any()):
                        return [Cause("outlives", text)]
    return []


def _mixtures(case: TrainingCase, now: Named, old: Named, trained: Sequence[str]) -> Iterator[tuple[str, str, Named]]:
    """(key, text, parameters): all old, all units but the root, one unit, the last shard.

    Which units are old is no mistake of its own: a unit that has not changed, or is alone, cannot tell.
    """
    yield "units", "", old
    by_unit = shards.units(case, list(now))
    chosen = {f"in {unit} alone": names for unit, names in by_unit.items() if len(by_unit) > 1}
    if len(by_unit) > 2 and shards.ROOT in by_unit:
        chosen["in all units but the root"] = [name for name in now if name not in by_unit[shards.ROOT]]
    for where, names in chosen.items():
        yield "units", f", {where}", {name: old[name] if name in names else now[name] for name in now}
    last = case.mesh.dp_shard - 1
    for owner in shards.owners(case, now, trained) if last else ():
        text = f", in the shard of the last rank ({last}) alone: a stale unsharded copy"
        yield "last shard", text, {name: torch.where(own == last, old[name], now[name]) for name, own in owner.items()}


def at(answer: Answer, step: int, parameters: Named) -> Named:
    """The released gradient, float64, that other parameters would give: one sample at a time, clipped if it has to."""
    case, wanted = answer.case, answer.steps[step]
    model = models.wide(case)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inputs = batches.inputs(case)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    body, loss = batches.targets(case).double(), models.loss_for(case)
    total = {name: torch.zeros_like(p) for name, p in trained.items()}
    with numerics.of(case):
        for row, (sample, count) in enumerate(zip(wanted.samples, wanted.multiplicity, strict=True)):
            packed = torch.cat([body[sample], wanted.targets[row]]).unsqueeze(0)
            found = torch.autograd.grad(
                loss(model(inputs[sample : sample + 1]), packed)[0], list(trained.values()),
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip
            weight = count * _factor(answer, found) / case.step.normaliser
            for name, gradient in zip(trained, found, strict=True):
                total[name] += weight * gradient
    return {name: total[name] for name in wanted.gradients if name in total or name == INSTRUMENT}


def _factor(answer: Answer, found: Sequence[Tensor]) -> float:
    if answer.case.step.clipping in ("none", "unclipped"):
        return 1.0
    dtype = models.DTYPES[answer.case.arithmetic.dtype]
    squared = torch.stack([gradient.square().sum() for gradient in found]).sum()
    return float(oracle.factors(squared.to(dtype).sqrt(), answer.clip_norm, answer.rule))
