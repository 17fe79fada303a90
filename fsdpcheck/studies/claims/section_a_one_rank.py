"""Section A, one rank alone: what a world of one must have in common with a single device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from fsdpcheck.adapters.contract import Observable
from fsdpcheck.case import Arithmetic, BatchLayout, Clipping, LayerSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks._read import recorded
from fsdpcheck.checks.clipping import assert_factors, assert_norms_exact
from fsdpcheck.checks.shape_matched_norms import assert_norms_near
from fsdpcheck.checks.shape_matched_replay import (
    assert_gradients_sum,
    assert_updates_follow,
    local_losses,
    parameters_before,
)
from fsdpcheck.checks.training import assert_gradients_equal, assert_parameters_equal
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.studies.claims.lab import Lab
from fsdpcheck.studies.claims.registry import Outcome, claim, only_if
from fsdpcheck.workload import batches

_MODEL = ModelSpec((LayerSpec(3, bias=True, activation="relu"), LayerSpec(2)), features=3, units=(1,))
_PLAIN = TrainingCase(_MODEL, layout=BatchLayout("contiguous", 4), step=StepSpec(steps=3, normaliser=4))
_PRIVATE = replace(_PLAIN, step=replace(_PLAIN.step, clipping="exact"))
_PLAINLY = ("fully_shard", "fsdp1", "reference", "reference_fsdp2")
_PRIVATELY = ("reference", "reference:bookkeeping", "reference:flash", "reference_fsdp2")
_SHOWN: tuple[Observable, ...] = ("grads", "norms", "factors")


@claim("A6", "World size 1 equals a single device (elsewhere a mean norm difference of 0.002 passed as success).")
def world_size_one_is_the_single_device(lab: Lab) -> Outcome:
    """Three steps by every adapter that ships: on integers every bit of all that is shown, then on real numbers."""
    exact = [name for name in _PLAINLY if _breaks(partial(_plain_bits, lab, name))]
    exact += [f"{name}, clipping" for name in _PRIVATELY if _breaks(partial(_private_bits, lab, name))]
    real = [name for name in _PLAINLY if _breaks(partial(_real_bits, lab, name))]
    near, apart, norms, largest = [], 0, 0, 0.0
    for name in _PRIVATELY:
        execution = lab.run(name)(_real("probe", 12), observe=("norms",))  # so many that some differ on every CPU
        near += [name] if _breaks(partial(assert_norms_near, execution)) else []
        differences = _from_definition(execution)
        apart, norms = apart + sum(map(bool, differences)), norms + len(differences)
        largest = max(largest, *differences)
    wrong = exact + real + near
    return Outcome(
        only_if("norms of real numbers may differ by their own rounding", under_it=not wrong, otherwise=apart == 0),
        f"trainings of 3 steps at W = 1 on integers, {len(_PLAINLY)} plain and {len(_PRIVATELY)} that clip each sample:"
        f" {len(_PLAINLY) + len(_PRIVATELY) - len(exact)} have every bit of the single device's parameters and"
        f" gradients, and of the norms and clip factors; on real numbers {len(_PLAINLY) - len(real)} of"
        f" {len(_PLAINLY)} have every bit of the gradients and updates, and all norms of"
        f" {len(_PRIVATELY) - len(near)} of {len(_PRIVATELY)} lie within what is proved of their rounding:"
        f" {apart} of {norms} differ from the definition's, by {largest / 2**-53:.1f} * 2^-53 of it at most"
        f"{'; wrong: ' + ', '.join(wrong) if wrong else ''}",
    )


def _breaks(check: Callable[[], None]) -> bool:
    try:
        check()
    except Violation:
        return True
    return False


def _plain_bits(lab: Lab, name: str) -> None:
    run = lab.run(name)
    execution = run(_PLAIN, observe=("grads",))
    assert_parameters_equal(execution, run.answer(_PLAIN))
    assert_gradients_equal(execution, run.answer(_PLAIN))


def _private_bits(lab: Lab, name: str) -> None:
    run = lab.run(name)
    execution = run(_PRIVATE, observe=_SHOWN)
    answer = run.answer(_PRIVATE)
    for check in (assert_parameters_equal, assert_gradients_equal, assert_norms_exact, assert_factors):
        check(execution, answer)


def _real_bits(lab: Lab, name: str) -> None:
    """One rank and one backward are one term, whose sum has no rounding: every bit is compared."""
    execution = lab.run(name)(_real("none"), observe=("grads",))
    assert_gradients_sum(execution)
    assert_updates_follow(execution)


def _real(clipping: Clipping, steps: int = 3) -> TrainingCase:
    step = replace(_PLAIN.step, clipping=clipping, steps=steps)
    return replace(_PLAIN, step=step, arithmetic=Arithmetic(numbers="real", project=False))


def _from_definition(execution: Execution) -> list[float]:
    """Relative differences of norms from the roots of the exactly added squares of each sample's own gradient."""
    found, case = [], execution.request.training
    for k in range(case.step.steps):
        before = parameters_before(execution.ranks[0], k, case)
        (_, shown), *_ = recorded(execution, k, "norms")
        for micro in batches.batch(case, k, 0, execution.request.instrument).micro_batches:
            losses, trained = local_losses(case, before, micro, execution.ranks[0].placement)
            for place, norm in zip(range(len(losses)), shown.tolist(), strict=True):
                gradients = torch.autograd.grad(losses[place], list(trained.values()), retain_graph=True)
                squares = [value.item() ** 2 for gradient in gradients for value in gradient.flatten()]
                wanted = math.sqrt(math.fsum(squares))
                found.append(abs(norm / wanted - 1) if wanted else float(norm != 0))
    return found
