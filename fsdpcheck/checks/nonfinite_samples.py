"""Checks of a step in which one sample's gradient is NaN or infinite: refused by all ranks, or as if it were not there.

Such a sample has no clip factor, and 0 * NaN is NaN: a weight of zero does not remove it. Of plain training see
nonfinite_norms.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from torch import Tensor

from fsdpcheck.case import TrainingCase, prng
from fsdpcheck.checks._compare import differing, first_index, number, require_equal
from fsdpcheck.checks._read import completed
from fsdpcheck.errors import NotExact, UsageError
from fsdpcheck.execution import Execution, RankResult, RankState
from fsdpcheck.findings.cause import Cause
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer
from fsdpcheck.strategies import metamorphic
from fsdpcheck.workload import batches


@dataclass(frozen=True)
class Spoiled:
    """``case`` of one step, whose ``sample`` shall have targets that are all ``value``; ``without`` has it nowhere."""

    case: TrainingCase
    without: TrainingCase
    sample: int
    value: float


def spoiled(case: TrainingCase) -> Spoiled:
    """One of the samples of the case's first step, and NaN or an infinity, as its seed says.

    Raises NotExact for a batch without samples.
    """
    listed = metamorphic.listed(replace(case, step=case.step.of_steps(1)))
    lists = listed.layout.lists
    sample, value = _chosen(case.seed, {sample for own in lists for sample in own})
    rest = tuple(tuple(other for other in own if other != sample) for own in lists)
    return Spoiled(listed, replace(listed, layout=replace(listed.layout, lists=rest)), sample, value)


def overflowing(case: TrainingCase) -> tuple[TrainingCase, tuple[int, float]]:
    """``case`` of plain training in one step, and which of its samples has a gradient with one element that is not
    finite: (sample, NaN or an infinity), as its seed says.

    Raises NotExact for a batch without samples.
    """
    one = replace(case, step=case.step.of_steps(1))
    return one, _chosen(case.seed, set(batches.logical_batch(one, 0)))


def _chosen(seed: int, present: AbstractSet[int]) -> tuple[int, float]:
    """One of the samples, and what is put in the place of its targets."""
    if not present:
        raise NotExact("there is no sample to spoil")
    sample = sorted(present)[int(prng.integers(seed, "spoiled", (1,), 0, len(present) - 1)[0])]
    return sample, (math.nan, math.inf, -math.inf)[int(prng.integers(seed, "by what", (1,), 0, 2)[0])]


def assert_refused_or_left_out(execution: Execution, pair: Spoiled, without: Answer) -> None:
    """Either every rank raises, and names the sample by its global number, or the step is that of the batch without it.

    Where they raise, what each rank trains is as it was before the step. Otherwise parameters, and gradients if
    recorded, are the single device's answer ``without``, bit for bit.
    """
    failure = execution.failure
    if failure is not None and failure.kind == "raised":
        told = {state.rank for state in failure.ranks} & {result.rank for result in execution.ranks}
        if missing := set(range(pair.case.world_size)) - told:
            raise UsageError(f"the run says nothing of ranks {sorted(missing)}; next: run it on an engine that does")
        for state in failure.ranks:
            _require_named(state, pair)
        for result in execution.ranks:
            _require_untouched(result, pair)
        return
    what = "a sample whose gradient is not finite was neither refused by all ranks nor left out"
    step = without.steps[0]
    for result in completed(execution):
        for words, got, wanted in (
            ("parameters", result.steps[0].params, step.after),
            ("gradients", result.steps[0].grads, step.used),
        ):
            if got is not None:
                where = f"step 0, rank {result.rank}, {words}; sample {pair.sample} is {pair.value}"
                require_equal(what, got, wanted, where, lambda got=got: _of_wrong(got))  # type: ignore[misc]


def _require_named(state: RankState, pair: Spoiled) -> None:
    said = " ".join(line for line in state.stack if not line.startswith("  "))
    if state.state == "raised" and re.search(rf"\b{pair.sample}\b", said):
        return
    raise Violation(
        "not every rank refuses a sample whose gradient is not finite, and names it",
        got=f"{state.state} {said}".strip(),
        wanted=f"an exception on every rank that names sample {pair.sample}",
        where=f"step 0, rank {state.rank}; sample {pair.sample} is {pair.value}",
    )


def _require_untouched(result: RankResult, pair: Spoiled) -> None:
    """Raises Violation for the first element that the rank trains and that a refused step has changed."""
    if result.refused is None:
        raise UsageError(f"the run says nothing of what rank {result.rank} trains; next: run it with spoiled samples")
    for place, (after, before) in enumerate(zip(result.refused.after, result.refused.before, strict=True)):
        if bool((wrong := differing(after, before)).any()):
            index = first_index(wrong)
            raise Violation(
                "a step that is refused changes parameters",
                got=number(after[index]),
                wanted=number(before[index]),
                where=f"step 0, rank {result.rank}, tensor {place} of those that its optimizer updates,"
                f" element {list(index)}; sample {pair.sample} is {pair.value}",
                cause="parameters are updated before the step is refused",
                despite=True,
            )


def _of_wrong(got: Mapping[str, Tensor]) -> list[Cause]:
    if any(not bool(value.isfinite().all()) for value in got.values()):
        through = "no rank raised for the sample, and it came through"
        text = f"{through}: a weight of zero does not leave it out, as 0 * NaN is NaN"
        return [Cause("not finite", text)]
    return []
