"""Checks of checkpoints: what goes on from one has the bits of what never stopped, and nothing else lies in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from fsdpcheck.adapters.contract import Features, Stored
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._compare import require_equal, unknown
from fsdpcheck.checks._read import completed
from fsdpcheck.checks.invariance import Side, assert_same_training, local_name
from fsdpcheck.diagnosis import checkpoint
from fsdpcheck.errors import NotApplicable, NotReadable
from fsdpcheck.execution import Execution, StepRecord
from fsdpcheck.findings.cause import Causes
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer
from fsdpcheck.workload.clip_groups import is_instrument

_AROUND = "the memory around a parameter, padding too, is written with it"


def going_on(case: TrainingCase, features: Features) -> TrainingCase:
    """The case in two steps at least, so that there is one before a stop and one after it."""
    if case.step.steps > 1:
        return case
    if "project" not in features.accepts:
        raise NotApplicable("a second step is exact for projected parameters only, which the adapter does not accept")
    return replace(case, step=replace(case.step, steps=2), arithmetic=replace(case.arithmetic, project=True))


def assert_resumed(first: Side, second: Side, what: str) -> None:
    """Each trainer of ``second`` starts from the parameters that were saved, and each step is that of ``first``.

    ``second`` loaded what it saved itself, or what ``first`` did. Gradients are compared too, where they are recorded.
    """
    saving, written = second if second[0].request.save_to else first
    kept = completed(saving)[0]
    for result in completed(second[0]):
        for k in range(1, len(result.steps)):
            got, wanted = result.steps[k].loaded, kept.steps[k - 1].saved
            assert got is not None
            assert wanted is not None
            where = f"before step {k}, rank {result.rank} of {len(second[0].ranks)}, saved by {len(saving.ranks)}"
            cause = partial(checkpoint.of_loaded, second[1], written, got, wanted)
            require_equal("what was loaded is not what was saved", _body(got), _body(wanted), where, cause)
    gradients, right = None, second[1]
    if first[1].case.step.noise_multiplier:
        never = _shown(first)
        gradients = partial(_of_noise, first[1], never)
        right = checkpoint.with_noise(right, never) if never else right
    elif right.case.step.evaluates != "no":
        gradients = partial(_of_gathered, right)
    assert_same_training(first, second, what, gradients, partial(_of_update, right))


def assert_stored(execution: Execution, pieces: list[Stored], step: int) -> None:
    """The pieces are every parameter that is trained or frozen, each element once, as shown when they were saved.

    And no file holds an element more than its piece has: that would be padding, or another parameter's. The state of
    optimizers lies there each element once too, and has no more of them than its parameter.
    """
    wanted = completed(execution)[0].steps[step].saved
    assert wanted is not None
    where = f"the checkpoint of step {step}"
    _require_bare(pieces, where)
    states = [piece for piece in pieces if piece.state]
    for name in sorted({piece.name for piece in states}):
        _require_no_more(name, [piece for piece in states if piece.name == name], wanted, where)
    own = [piece for piece in pieces if not piece.state]
    got = {name: _assembled(name, [p for p in own if p.name == name], where) for name in {p.name for p in own}}
    require_equal("a checkpoint does not hold the parameters", got, wanted, where, unknown)


def assert_readable(saved: Side, read: Callable[[], Mapping[str, Tensor]], step: int) -> None:
    """A model that ``read`` fills from a checkpoint has the parameters that were shown when it was saved."""
    execution, answer = saved
    wanted = completed(execution)[0].steps[step].saved
    assert wanted is not None
    where = f"the unsharded model, from the checkpoint of step {step}"
    try:
        got = read()
    except NotReadable as error:
        what = "an unsharded model cannot be filled"
        raise Violation(what, got=str(error), wanted="the parameters that were saved", where=where) from error
    cause = partial(checkpoint.of_read, answer, got, wanted)
    require_equal("an unsharded model reads other parameters", got, wanted, where, cause)


def _require_bare(pieces: list[Stored], where: str) -> None:
    """Each piece has the shape that the checkpoint says, and no memory beside it."""
    for piece in pieces:
        held = piece.held
        if held is None:
            held = piece.value.untyped_storage().nbytes() // piece.value.element_size()
        if (held, tuple(piece.value.shape)) != (prod(piece.sizes), piece.sizes):
            raise Violation(
                "a checkpoint does not hold the pieces it names",
                got=f"{held} elements in the file",
                wanted=f"{prod(piece.sizes)}, in shape {list(piece.sizes)}",
                where=f"{where}, {piece.name} at {list(piece.offsets)}",
                cause=_AROUND if held > prod(piece.sizes) else "",
            )


def _require_no_more(name: str, pieces: list[Stored], parameters: Mapping[str, Tensor], where: str) -> None:
    """A state is whole, and has no more elements than its parameter, or one."""
    held = _assembled(name, pieces, where).numel()
    of = pieces[0].of
    most = max(parameters[of].numel(), 1) if of in parameters else held
    if held > most:
        raise Violation("a checkpoint holds more of a state than its parameter has", got=f"{held} elements",
                        wanted=f"{most} at most, as {of} has", where=f"{where}, {name}", cause=_AROUND)  # fmt: skip


def _assembled(name: str, pieces: list[Stored], where: str) -> Tensor:
    """The whole of one tensor. Raises Violation unless every element is in exactly one piece."""
    shape = pieces[0].shape
    count, whole = torch.zeros(shape, dtype=torch.int64), torch.full(shape, float("nan"), dtype=pieces[0].value.dtype)
    for piece in pieces:
        part = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.value.shape, strict=True))
        count[part] += 1
        whole[part] = piece.value
    if prod(shape) and not bool((count == 1).all()):
        got = f"{int((count == 0).sum())} elements in no piece, {int((count > 1).sum())} in several"
        raise Violation("a checkpoint does not hold each tensor once", got=got, wanted=f"{prod(shape)} once",
                        where=f"{where}, {name}")  # fmt: skip
    return whole


def _body(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {local_name(name): value for name, value in named.items() if not is_instrument(name)}


def _shown(never: Side) -> list[checkpoint.Shown]:
    """What rank 0 showed of each step; nothing where a step shows no gradients."""
    steps = never[0].ranks[0].steps
    whole: list[checkpoint.Shown] = [(own.grads, own.params) for own in steps if own.grads is not None]
    return whole if len(whole) == len(steps) else []


def _of_noise(answer: Answer, never: list[checkpoint.Shown], step: int, got: StepRecord) -> Causes | None:
    return checkpoint.of_noise(answer, step, never, got.grads) if step and got.grads is not None and never else None


def _of_gathered(answer: Answer, step: int, got: StepRecord) -> Causes | None:
    return checkpoint.of_gathered(answer, step, got.grads) if step and got.grads is not None else None


def _of_update(answer: Answer, step: int, got: StepRecord) -> Causes:
    return checkpoint.of_update(answer, step, got.params)
