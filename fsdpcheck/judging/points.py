"""Points: quantities of one rank's step in order, each beside the single device's, and how it differs.

Compared bit for bit where every bit must agree. Elsewhere, where an implementation may round, gradients and the global
norm are compared up to ``_ROOM`` of the absolute sum of what is added up in them, which is beyond any rounding: so what
is said to differ does, and what is not may still.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.adapters.contract import GlobalNormRule
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks import square_roots
from fsdpcheck.checks._compare import alike
from fsdpcheck.checks._read import local_rows
from fsdpcheck.execution import RankResult, StepRecord
from fsdpcheck.execution.quantities import Quantity
from fsdpcheck.execution.whole import NotWhole, make_whole
from fsdpcheck.oracle import Answer, Named, StepAnswer
from fsdpcheck.oracle.certificate import absolute_gradients
from fsdpcheck.program.probes.step_data import quantities, quantities_but_local_gradients
from fsdpcheck.workload import batches, models

WORDS: Final = {
    "parameter": "a parameter as the forward reads it",
    "samples": "the samples that arrive at the loss",
    "local gradient": "the local gradient",
    "norms": "the norms",
    "factors": "the clip factors",
    "options": "the options of the optimizer",
    "gradient": "the reduced gradient",
    "global norm": "the global norm",
    "global factor": "the factor that clips all gradients",
    "updated": "the parameters",
}
"""Quantities in the order of a step, in words."""
ORDER: Final = tuple(WORDS)
MISSING: Final = "is missing"
"""How a quantity differs that is not there."""
_ROOM: Final = {"float64": 2.0**-32, "float32": 2.0**-12}


@dataclass(frozen=True)
class Differing:
    """An element that differs: what it is, and should be."""

    got: float
    wanted: float


@dataclass(frozen=True)
class Point:
    """A quantity at its place in one rank's step. ``wrong``: in words how it differs; "" where it is right.

    ``lines`` and ``calls`` are empty and -1 where it was shown after the step. ``times``: which multiple of the right
    value it is, 1 where it is none. ``element``: the first that differs. ``row``: of norms, that of its sample in the
    answer.
    """

    kind: str
    name: str
    wrong: str
    lines: tuple[str, ...] = ()
    calls: int = -1
    times: float = 1.0
    element: Differing | None = None
    row: int = -1


def by_step(result: RankResult) -> dict[int, list[Quantity]]:
    found: dict[int, list[Quantity]] = {}
    for looking in (quantities, quantities_but_local_gradients):
        for _, step, value in looking.saw(result):
            found.setdefault(step, []).append(value)
    return found


def put_together(noted: list[dict[int, list[Quantity]]]) -> None:
    """Whole tensors in the place of pieces that ranks have; None where they make none."""
    for step in sorted({step for own in noted for step in own}):
        for kind in ("gradient", "updated"):
            named = [
                {one.name: one.value for one in own.get(step, []) if one.kind == kind and one.value is not None}
                for own in noted
            ]
            try:
                make_whole(named, kind)
            except NotWhole:
                named = [{} for _ in noted]
            for own, values in zip(noted, named, strict=True):
                own[step] = [_with(one, kind, values) for one in own.get(step, [])]


def _with(one: Quantity, kind: str, values: dict[str, Any]) -> Quantity:
    if one.kind != kind:
        return one
    return Quantity(one.kind, one.name, one.micro_batch, values.get(one.name), one.calls, one.lines)


class Compared(NamedTuple):
    """What of a case is compared. ``bits``: gradients and parameters, in every bit. ``near``: gradients, up to
    ``_ROOM``. ``clipped``: the rule by which gradients are clipped by their global norm, which is then compared too."""

    bits: bool = False
    near: bool = False
    clipped: GlobalNormRule | None = None


def points(
    answer: Answer, number: int, result: RankResult, noted: list[Quantity], compared: Compared
) -> Iterator[Point]:
    """One rank's quantities of one step in the order of a step: those that it noted, and those that it showed.

    What was shown of gradients belongs before the optimizer, at whose line it is needed, unless that was seen to read
    others; what was shown of parameters comes last. Where that is right, an optimizer that left them otherwise updates
    something else, as masters of theirs.
    """
    shown = {point.kind: point for point in _shown(answer, number, result, compared)}
    arrives = "updated" in shown and not shown["updated"].wrong
    seen, local = {one.kind for one in noted}, _Local(answer, number, result.rank, noted)
    for one in noted:
        if one.kind == "options":
            formed = ("norms", "factors", *(("gradient",) if "gradient" not in seen else ()))
            for kind in (*formed, "global norm", "global factor"):
                if kind in shown:
                    yield replace(shown.pop(kind), lines=one.lines, calls=one.calls)
        elif one.kind == "updated" and "gradient" in shown:
            yield shown.pop("gradient")
        if compared.bits or one.kind not in ("gradient", "updated"):
            point = _point(answer, number, result.rank, one, local)
            yield replace(point, wrong="", times=1.0) if arrives and one.kind == "updated" else point
    yield from shown.values()


def _shown(answer: Answer, number: int, result: RankResult, compared: Compared) -> Iterator[Point]:
    """What the adapter showed after the step."""
    step, record = answer.steps[number], result.steps[number]
    rows = local_rows(answer.case, number, result.rank, step.samples)
    if record.norms is not None:
        yield _of_rows("norms", record.norms, square_roots.norms(answer, step, rows, record.norms), rows)
    if record.factors is not None:
        yield _of_rows("factors", record.factors, square_roots.factors(answer, step, rows, record.factors), rows)
    if compared.clipped is not None:
        yield from _globally_clipped(answer, step, record, compared.clipped)
    elif compared.bits:
        yield from _named("gradient", record.grads, step.used)
        yield from _named("updated", record.params, step.after)
    elif compared.near:
        yield from _named("gradient", record.grads, step.used, _magnitudes(answer, step, answer.case.arithmetic.dtype))


def _of_rows(kind: str, got: Tensor, wanted: Tensor, rows: list[int]) -> Point:
    text, element = _differs(got, wanted), _first_differing(got, wanted)
    at = int((got != wanted).flatten().nonzero()[0]) if element is not None and got.dim() == 1 else -1
    return Point(kind, "", text, element=element, row=rows[at] if at >= 0 else -1)


def _globally_clipped(answer: Answer, step: StepAnswer, record: StepRecord, rule: GlobalNormRule) -> Iterator[Point]:
    """Whether gradients have the right direction, their norm before, and the factor that all are multiplied by.

    Where they have not, whether they differ from those that the single device uses.
    """
    case, dtype = answer.case, rule.of(answer.case.arithmetic.dtype)
    assert case.step.max_grad_norm is not None
    right = oracle.global_factor(step.grad_norm.double(), case.step.max_grad_norm, rule.eps)
    room, factor = _magnitudes(answer, step, dtype), None
    if record.grads is not None:
        factor = _common_factor(record.grads, step, room)
        used = {name: step.released[name].double() * right for name in step.used}
        yield from _named("gradient", record.grads, used, room) if factor is None else [Point("gradient", "", "")]
    if record.grad_norm is not None and record.grad_norm.numel() == 1:
        yield _of_number("global norm", float(record.grad_norm), float(step.grad_norm), dtype)
    if factor is not None:
        yield _of_number("global factor", factor, float(right), dtype)


def _of_number(kind: str, got: float, wanted: float, dtype: str) -> Point:
    if abs(got - wanted) <= _ROOM[dtype] * abs(wanted):
        return Point(kind, "", "")
    return Point(kind, "", f"is {got:.17g}, wanted {wanted:.17g}", element=Differing(got, wanted))


def _common_factor(got: Mapping[str, Tensor], step: StepAnswer, room: Named) -> float | None:
    """c of got = c * released for all gradients; None where there is none."""
    right = {name: step.released[name].double() for name in step.used}
    name = max(right, key=lambda name: float(right[name].abs().max()), default="")
    if name not in got or got[name].shape != right[name].shape or not bool(right[name].any()):
        return None
    most = int(right[name].abs().argmax())
    factor = float(got[name].double().flatten()[most] / right[name].flatten()[most])
    for other, value in right.items():
        own = got.get(other)
        if own is None or own.shape != value.shape:
            return None
        if not bool(((own.double() - factor * value).abs() <= max(abs(factor), 1.0) * room[other]).all()):
            return None
    return factor


def _magnitudes(answer: Answer, step: StepAnswer, dtype: str) -> Named:
    """What each gradient may differ by without that this is said: a share of every path's absolute value added up."""
    case = answer.case
    room = _ROOM[dtype] * models.loss_scale(case) / case.step.normaliser
    times = torch.tensor(step.multiplicity, dtype=torch.float64)
    paths = absolute_gradients(case, step)
    return {name: room * torch.tensordot(times, value, dims=1) for name, value in paths.items()}


def _named(kind: str, shown: Mapping[str, Tensor] | None, wanted: Named, room: Named | None = None) -> Iterator[Point]:
    """The first of ``wanted`` that what was ``shown`` differs from, by more than ``room``."""
    if shown is None:
        return
    for name, value in wanted.items():
        got = shown.get(name)
        if room is not None and got is not None and got.shape == value.shape:
            near = (got.double() - value.double()).abs() <= room[name]
            got = torch.where(near, value.to(got.dtype), got)
        if text := _differs(got, value):
            times = _times(got.double(), value.double()) if got is not None else None
            yield Point(kind, name, text, times=times or 1.0, element=_first_differing(got, value))
            return
    yield Point(kind, "", "")


def _differs(got: Tensor | None, wanted: Tensor) -> str:
    """How, in a few words; "" if it does not."""
    if got is None:
        return MISSING
    if got.shape != wanted.shape:
        return f"has the shape {[*got.shape]}, wanted {[*wanted.shape]}"
    if got.dtype == wanted.dtype and alike(got, wanted):
        return ""
    index = _first_place(got, wanted)
    if index is None:
        return f"is {got.dtype}, wanted {wanted.dtype}" if got.dtype != wanted.dtype else ""
    return f"{list(index)} is {got[index].item():.17g}, wanted {wanted[index].item():.17g}"


def _first_place(got: Tensor, wanted: Tensor) -> tuple[int, ...] | None:
    mask = ~((got == wanted) | (got.isnan() & wanted.isnan()))
    return tuple(int(place) for place in mask.nonzero()[0]) if bool(mask.any()) else None


def _first_differing(got: Tensor | None, wanted: Tensor) -> Differing | None:
    if got is None or got.shape != wanted.shape:
        return None
    index = _first_place(got, wanted)
    return None if index is None else Differing(float(got[index]), float(wanted[index]))


def _point(answer: Answer, number: int, rank: int, one: Quantity, local: _Local) -> Point:
    """A quantity that was noted, beside the single device's. It is right where nothing is known of it."""
    case, step = answer.case, answer.steps[number]
    wrong, times, element = "", 1.0, None
    if one.kind == "options":
        wrong = _options(case, number, one.value)
    elif one.kind == "samples" and not case.step.private:  # who clips may try its model on data of its own
        wrong = _samples(answer, number, rank, one.value)
    elif case.arithmetic.compute == "dtype" and one.value is not None:
        wanted = {"parameter": step.before, "gradient": step.used, "updated": step.after}.get(one.kind)
        if one.kind == "local gradient":
            wrong, times = local.wrong(one)
        elif wanted is not None and one.name in wanted and one.value.shape == wanted[one.name].shape:
            wrong = _differs(one.value, wanted[one.name])
            times = _times(one.value.double(), wanted[one.name].double()) or 1.0
            element = _first_differing(one.value, wanted[one.name])
    return Point(one.kind, one.name, wrong, one.lines, one.calls, times, element)


def _options(case: TrainingCase, number: int, changed: dict[str, tuple[object, object]]) -> str:
    """What an optimizer has otherwise than it was made, if the case's schedule does not say so."""
    halves = case.step.optimizer.schedule == "halving"
    for key, (now, was) in changed.items() if case.step.optimizer.kind != "own" else ():
        wanted = was * 2.0**-number if halves and key.startswith("lr") and isinstance(was, float) else was
        if now != wanted:
            return f"have {key} {now}, wanted {wanted}"
    if halves and number and not any(key.startswith("lr") for key in changed):
        return "have the learning rate of the first step"
    return ""


def _samples(answer: Answer, number: int, rank: int, targets: Tensor) -> str:
    """Which of the samples that arrived are none of the rank's in this step."""
    own = batches.batch(answer.case, number, rank, answer.instrument)
    rows = {tuple(row) for micro in own.micro_batches for row in micro.targets.double().flatten(1).tolist()}
    strangers = [place for place, row in enumerate(targets.double().flatten(1).tolist()) if tuple(row) not in rows]
    return f"are not this rank's, as number {strangers[0]} of {len(targets)}" if strangers else ""


class _Local:
    """What samples of one rank give for each parameter in one step, beside what its backwards gave.

    Backwards may have parts of a micro-batch each, or uses of one parameter; then their sum tells.
    """

    def __init__(self, answer: Answer, number: int, rank: int, noted: Sequence[Quantity]) -> None:
        case, step = answer.case, answer.steps[number]
        self._known = case.model.own is None and not case.step.private and case.arithmetic.compute == "dtype"
        place = {sample: row for row, sample in enumerate(step.samples)}
        self._rows = [[place[sample] for sample in chunk] for chunk in batches.indices(case, number)[rank]]
        self._scale = batches.share(case, answer.arithmetic.averaging != "none")
        self._gradients = step.gradients
        given: dict[str, list[Tensor]] = {}
        for one in noted if self._known else ():
            if one.kind == "local gradient" and one.name in self._gradients:
                given.setdefault(one.name, []).append(one.value.double())
        everything = [row for rows in self._rows for row in rows]
        self._whole = {name: _times(_summed(own), self._of(name, everything)) for name, own in given.items()}

    def wrong(self, one: Quantity) -> tuple[str, float]:
        """(how what one backward gave differs from a multiple of what the rank's samples give, that multiple)."""
        times = self._whole.get(one.name, 1.0)
        if times is not None:
            return "", times
        wanted = [self._of(one.name, rows) for rows in self._rows]
        if any(_times(one.value.double(), each) is not None for each in wanted):
            return "", 1.0
        at = min(max(one.micro_batch - 1, 0), len(wanted) - 1)
        return _differs(one.value.double(), wanted[at]), 1.0

    def _of(self, name: str, rows: list[int]) -> Tensor:
        return self._gradients[name][rows].sum(0) * self._scale


def _summed(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([*values]).sum(0) if len({value.shape for value in values}) == 1 else values[0]


def _times(got: Tensor, wanted: Tensor) -> float | None:
    """c of got = c * wanted, exactly; None where there is none."""
    if got.shape != wanted.shape:
        return None
    if not bool(wanted.any()):
        return None if bool(got.any()) else 1.0
    most = int(wanted.abs().argmax())
    times = float(got.flatten()[most] / wanted.flatten()[most])
    return times if torch.equal(wanted * times, got) and times else None
