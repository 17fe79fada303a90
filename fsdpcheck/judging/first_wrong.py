"""Where a step first goes wrong: the first quantity that differs from the single device's, and the lines around it.

One more run of the case notes what passes (``program/probes/passing.py``), beside what the adapter shows after each
step. The single device has each of these quantities too, so the first that differs bounds the mistake: what came
before it is right. Said of exact cases alone, and only where what is compared must agree in every bit.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks import square_roots
from fsdpcheck.checks._compare import alike
from fsdpcheck.checks._read import local_rows
from fsdpcheck.checks.clipping import comparable
from fsdpcheck.execution import Execution, RankResult, RunRequest
from fsdpcheck.execution.quantities import Quantity
from fsdpcheck.execution.whole import NotWhole, make_whole
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import Answer, standards
from fsdpcheck.program.probes.passing import quantities, quantities_but_local_gradients
from fsdpcheck.workload import batches

INITIAL: Final = "the parameters before the first step"
_WORDS: Final = {
    "parameter": "a parameter as the forward reads it",
    "samples": "the samples that arrive at the loss",
    "local gradient": "the local gradient",
    "norms": "the norms",
    "factors": "the clip factors",
    "options": "the options of the optimizer",
    "gradient": "the reduced gradient",
    "updated": "the parameters",
}
"""Quantities in the order of a step."""
_ORDER: Final = tuple(_WORDS)
_READ: Final = ("norms", "factors", "gradient")
"""Quantities that are formed before the line where they are seen."""
_CALLS: Final = 3
"""Most collectives that are named between two lines."""


@dataclass(frozen=True)
class Point:
    """A quantity at its place in one rank's step. ``wrong``: in words how it differs; "" where it is right.

    ``lines`` and ``calls`` are empty and -1 where it was shown after the step. ``times``: which multiple of the right
    value it is, 1 where it is none.
    """

    kind: str
    name: str
    wrong: str
    lines: tuple[str, ...] = ()
    calls: int = -1
    times: float = 1.0


@dataclass(frozen=True)
class FirstWrong:
    """``text``: what to say, "" for nothing. ``place``: "file:line" where the first wrong quantity was seen, or, if it
    was seen at no line, the last right one; "" if nothing is wrong. ``quantity``: of which kind it is; "" so too."""

    text: str = ""
    place: str = ""
    quantity: str = ""


def first_wrong(run: Run, case: TrainingCase, asked: RunRequest | None = None) -> FirstWrong:
    """What of a step differs first, with the lines around it; nothing where none can be told.

    With the features of FSDP2 in use that were ``asked`` for, and nothing is told if they were asked for in another
    case.
    """
    using, probes = (asked.using, asked.probes) if asked is not None and asked.using else ((), ())
    if asked is not None and using and asked.case != case:
        return FirstWrong()
    tier = run.tier(case)
    if tier == "replay" or run.features.factor.nested:
        return FirstWrong()
    whole = standards.every_bit(tier) and case.step.max_grad_norm is None
    wanted = {"norms", "factors"} if case.step.private else set()
    wanted |= {"grads"} if whole else set()
    observe = run.features.observables & wanted
    looking = quantities_but_local_gradients if case.step.private else quantities
    answer, execution = run.answer(case), run(case, observe, using=using, probes=(*probes, looking))
    if execution.failure is not None:
        return FirstWrong()
    before = answer.steps[0].before
    if any(not alike(own.initial.get(name), value) for own in execution.ranks for name, value in before.items()):
        return FirstWrong(f"the first to differ: {INITIAL}", quantity="initial parameters")
    in_use = f" (with {', '.join(using)} in use)" * bool(using)
    return _told(answer, execution, whole, in_use)


def _told(answer: Answer, execution: Execution, whole: bool, in_use: str) -> FirstWrong:
    right: dict[str, None] = {}
    noted = [_by_step(result) for result in execution.ranks]
    _put_together(noted)
    for number in range(len(answer.steps)) if whole else [number for number, _ in comparable(execution, answer)]:
        ranks = [
            [*_points(answer, number, result, own.get(number, []), whole)]
            for result, own in zip(execution.ranks, noted, strict=True)
        ]
        firsts = [(_place(points), rank) for rank, points in enumerate(ranks) if any(one.wrong for one in points)]
        if firsts:
            (_, at), rank = min(firsts)
            return _sentence(execution, ranks[rank], at, rank, f"in step {number}{in_use}", right)
        right.update(dict.fromkeys(_WORDS[point.kind] for point in ranks[0]))
    ordered = [word for word in _WORDS.values() if word in right]
    return FirstWrong(f"right, as far as they are compared bit for bit{in_use}: {', '.join(ordered)}" if right else "")


def _place(points: Sequence[Point]) -> tuple[int, int]:
    """(where in a step the first wrong one belongs, its number)."""
    at = next(number for number, point in enumerate(points) if point.wrong)
    return _ORDER.index(points[at].kind), at


def _by_step(result: RankResult) -> dict[int, list[Quantity]]:
    found: dict[int, list[Quantity]] = {}
    for looking in (quantities, quantities_but_local_gradients):
        for _, step, value in looking.saw(result):
            found.setdefault(step, []).append(value)
    return found


def _put_together(noted: list[dict[int, list[Quantity]]]) -> None:
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


def _points(answer: Answer, number: int, result: RankResult, noted: list[Quantity], whole: bool) -> Iterator[Point]:
    """One rank's quantities of one step in the order of a step: those that it noted, and those that it showed.

    What was shown of gradients belongs before the optimizer, at whose line it is needed, unless that was seen to read
    others; what was shown of parameters comes last. Where that is right, an optimizer that left them otherwise updates
    something else, as masters of theirs.
    """
    shown = {point.kind: point for point in _shown(answer, number, result, whole)}
    arrives = "updated" in shown and not shown["updated"].wrong
    seen, local = {one.kind for one in noted}, _Local(answer, number, result.rank, noted)
    for one in noted:
        if one.kind == "options":
            for kind in ("norms", "factors", *(("gradient",) if "gradient" not in seen else ())):
                if kind in shown:
                    yield replace(shown.pop(kind), lines=one.lines, calls=one.calls)
        elif one.kind == "updated" and "gradient" in shown:
            yield shown.pop("gradient")
        if whole or one.kind not in ("gradient", "updated"):
            point = _point(answer, number, result.rank, one, local)
            yield replace(point, wrong="", times=1.0) if arrives and one.kind == "updated" else point
    yield from shown.values()


def _shown(answer: Answer, number: int, result: RankResult, whole: bool) -> Iterator[Point]:
    """What the adapter showed after the step."""
    step, record = answer.steps[number], result.steps[number]
    rows = local_rows(answer.case, number, result.rank, step.samples)
    if record.norms is not None:
        wanted = square_roots.norms(answer, step, rows, record.norms)
        yield Point("norms", "", _differs(record.norms, wanted))
    if record.factors is not None:
        wanted = square_roots.factors(answer, step, rows, record.factors)
        yield Point("factors", "", _differs(record.factors, wanted))
    if whole:
        yield from _named("gradient", record.grads, step.used)
        yield from _named("updated", record.params, step.after)


def _named(kind: str, shown: dict[str, Tensor] | None, wanted: dict[str, Tensor]) -> Iterator[Point]:
    if shown is None:
        return
    wrong = {name: text for name, value in wanted.items() if (text := _differs(shown.get(name), value))}
    name = next(iter(wrong), "")
    times = _times(shown[name].double(), wanted[name].double()) if name in shown else None
    yield Point(kind, name, wrong.get(name, ""), times=times or 1.0)


def _differs(got: Tensor | None, wanted: Tensor) -> str:
    """How, in a few words; "" if it does not."""
    if got is None:
        return "is missing"
    if got.shape != wanted.shape:
        return f"has the shape {[*got.shape]}, wanted {[*wanted.shape]}"
    if got.dtype == wanted.dtype and alike(got, wanted):
        return ""
    mask = ~((got == wanted) | (got.isnan() & wanted.isnan()))
    if not bool(mask.any()):
        return f"is {got.dtype}, wanted {wanted.dtype}" if got.dtype != wanted.dtype else ""
    index = tuple(int(place) for place in mask.nonzero()[0])
    return f"{list(index)} is {got[index].item():.17g}, wanted {wanted[index].item():.17g}"


def _point(answer: Answer, number: int, rank: int, one: Quantity, local: _Local) -> Point:
    """A quantity that was noted, beside the single device's. It is right where nothing is known of it."""
    case, step = answer.case, answer.steps[number]
    wrong, times = "", 1.0
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
    return Point(one.kind, one.name, wrong, one.lines, one.calls, times)


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


def _sentence(
    execution: Execution, points: Sequence[Point], at: int, rank: int, when: str, right: dict[str, None]
) -> FirstWrong:
    """In words, with the lines around it."""
    at = _scaled_before(points, at)
    wrong, before = points[at], points[:at]
    until = dict.fromkeys([*right, *(_WORDS[point.kind] for point in before)])
    until.pop(_WORDS[wrong.kind], None)
    of = f" of {wrong.name}" if wrong.name else ""
    differs = ", ".join(part for part in (wrong.wrong, _multiple(wrong)) if part)
    words = [f"the first to differ, {when}: {_WORDS[wrong.kind]}{of} on rank {rank}: {differs}"]
    if until:
        words.append(f"right until then: {', '.join(word for word in _WORDS.values() if word in until)}")
    known = [point for point in reversed(before) if point.lines and _begins_before(point, wrong)]
    last = next((point for point in known if wrong.name and point.name == wrong.name), known[0] if known else None)
    if last is not None and last.lines != wrong.lines:
        words.append(f"last right at {_line(last.lines[0])}")
        words += _between(execution, rank, last, wrong)
    if wrong.lines:
        behind = "by" if wrong.kind in _READ else "within" if last and last.lines == wrong.lines else "at"
        words.append(f"wrong {behind} {_line(wrong.lines[0])}")
    elif wrong.kind == "updated" and not any(point.kind == "options" for point in points):
        words.append("no optimizer that the adapter was given has stepped on this rank")
    lines = wrong.lines or (last.lines if last else ())
    return FirstWrong("\n".join(words), lines[0].partition(" ")[0] if lines else "", wrong.kind)


def _begins_before(point: Point, wrong: Point) -> bool:
    """Whether ``wrong`` may have gone wrong behind ``point``; an optimizer that reads a gradient has not formed it."""
    return wrong.kind != "gradient" or point.lines != wrong.lines or point.kind == "local gradient"


def _scaled_before(points: Sequence[Point], at: int) -> int:
    """The number of the first local gradient that is the same multiple of the right one as a wrong gradient is."""
    for number, point in enumerate(points[:at]):
        if point.kind == "local gradient" and point.times != 1.0 and points[at].times == point.times:
            return number
    return at


def _multiple(wrong: Point) -> str:
    if wrong.times == 1.0:
        return ""
    return f"{'which ' * bool(wrong.wrong)}is {wrong.times:.17g} times the right one"


def _between(execution: Execution, rank: int, last: Point | None, wrong: Point) -> Iterator[str]:
    """The collectives between two quantities, those of the wrong parameter's unit if there are such."""
    if last is None or wrong.calls < 0:
        return
    calls = execution.ranks[rank].trace[last.calls : wrong.calls]
    own = [call for call in calls if call.subject and f".{call.subject}." in f".{wrong.name}."]
    told = dict.fromkeys(
        f"{call.op}{f' of {call.subject}' if call.subject else ''} at {_line(call.where)}" for call in own or calls
    )
    more = f", and {len(told) - _CALLS} more" if len(told) > _CALLS else ""
    if told:
        yield f"in between: {'; '.join([*told][:_CALLS])}{more}"


def _line(at: str) -> str:
    """ "file:line in function: its source text", as far as they are known."""
    place, _, function = at.partition(" ")
    file, _, number = place.rpartition(":")
    text = linecache.getline(file, int(number)).partition("  # ")[0].strip() if number.isdecimal() else ""
    return place + (f" in {function}" if function else "") + (f": {text}" if text else "")
