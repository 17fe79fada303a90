"""Where a step first goes wrong: the first quantity that differs from the single device's, and the lines around it.

One more run of the case notes what passes (``program/probes/step_data.py``), beside what the adapter shows after each
step. The single device has each of these quantities too, so the first that differs bounds the mistake: what came
before it is right. Said of exact cases alone, and only where what is compared must agree in every bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._compare import alike
from fsdpcheck.checks.clipping import comparable
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.execution.trace import Collective
from fsdpcheck.judging.points import MISSING, ORDER, WORDS, Compared, Point, by_step, put_together
from fsdpcheck.judging.points import points as points_of
from fsdpcheck.judging.run import Run
from fsdpcheck.judging.value_trail import Number, Sought, Trail, line_of, trail, with_square
from fsdpcheck.oracle import Answer, StepAnswer, standards
from fsdpcheck.program.probes.step_data import quantities, quantities_but_local_gradients
from fsdpcheck.workload import batches

INITIAL: Final = "the parameters before the first step"
_READ: Final = ("norms", "factors", "gradient", "global norm", "global factor")
"""Quantities that are formed before the line where they are seen."""
_CALLS: Final = 3
"""Most collectives that are named between two lines."""


@dataclass(frozen=True)
class FirstWrong:
    """``text``: what to say, "" for nothing. ``place``: "file:line" where the first wrong quantity was seen, or, if it
    was seen at no line, the last right one; "" if nothing is wrong. ``quantity``: of which kind it is; "" so too.
    ``trails``: where its numbers were seen, of a run that notes them: that of the quantity, or those of its parts.
    ``unknown``: why nothing can be said, where that is so. ``missing``: whether the quantity is not there at all.
    """

    text: str = ""
    place: str = ""
    quantity: str = ""
    trails: tuple[tuple[str, Trail], ...] = ()
    unknown: str = ""
    missing: bool = False


NOT_KNOWN: Final = FirstWrong()

_NOTHING: Final = {
    "other case": "the law compares cases with each other, and the adapter was asked for features in one of them alone",
    "replay": "on real numbers quantities are judged within bounds, and not bit for bit",
    "nested": "norms are rounded module by module, so no bits are compared",
    "failed": "the step fails when its quantities are noted",
}
"""Why nothing can be said of a case."""


def first_wrong(run: Run, case: TrainingCase, asked: RunRequest | None = None) -> FirstWrong:
    """What of a step differs first, with the lines around it; nothing where none can be told.

    With the features of FSDP2 in use that were ``asked`` for, and nothing is told if they were asked for in another
    case.
    """
    using, probes = (asked.using, asked.probes) if asked is not None and asked.using else ((), ())
    if asked is not None and using and asked.case != case:
        return FirstWrong(unknown=_NOTHING["other case"])
    tier = run.tier(case)
    if tier == "replay" or run.features.factor.nested:
        return FirstWrong(unknown=_NOTHING["replay" if tier == "replay" else "nested"])
    compared, wanted = _compared(run, case), {"norms", "factors"} if case.step.private else set()
    wanted |= {"grads"} if compared != Compared() else set()
    wanted |= {"grad_norm"} if compared.clipped else set()
    observe = run.features.observables & wanted
    looking = quantities_but_local_gradients if case.step.private else quantities
    answer, execution = run.answer(case), run(case, observe, using=using, probes=(*probes, looking))
    if execution.failure is not None:
        return FirstWrong(unknown=_NOTHING["failed"])
    if (initially := _initially(execution, answer)) is not None:
        return initially
    in_use = f" (with {', '.join(using)} in use)" * bool(using)
    return _told(answer, execution, compared, in_use)


def _initially(execution: Execution, answer: Answer) -> FirstWrong | None:
    """Of parameters that are wrong before the first step: which, and the collectives until then."""
    before = answer.steps[0].before
    for own in execution.ranks:
        wrong = next((name for name, value in before.items() if not alike(own.initial.get(name), value)), "")
        if wrong:
            calls = _calls(own.trace[: own.calls_until_initial], wrong)
            words = [f"the first to differ: {INITIAL}, {wrong} on rank {own.rank}"]
            return FirstWrong("\n".join(words + [f"until then: {one}" for one in calls]), quantity="initial parameters")
    return None


def _compared(run: Run, case: TrainingCase) -> Compared:
    """Noise is in no answer. What few bits hold is compared in every bit, or not at all."""
    rule, every_bit = run.features.global_norm, standards.every_bit(run.tier(case))
    near = case.arithmetic.compute == "dtype" and len(run.answer(case).clip_norms) == 1
    if case.step.noise_multiplier:
        return Compared()
    if case.step.max_grad_norm is not None:
        return Compared(clipped=rule) if near and not rule.norm.eps else Compared()
    return Compared(every_bit, near)


def _told(answer: Answer, execution: Execution, compared: Compared, in_use: str) -> FirstWrong:
    right: dict[str, None] = {}
    noted = [by_step(result) for result in execution.ranks]
    put_together(noted)
    for number in (
        range(len(answer.steps)) if compared.bits else [number for number, _ in comparable(execution, answer)]
    ):
        ranks = [
            [*points_of(answer, number, result, own.get(number, []), compared)]
            for result, own in zip(execution.ranks, noted, strict=True)
        ]
        firsts = [(_place(points), rank) for rank, points in enumerate(ranks) if any(one.wrong for one in points)]
        if firsts:
            (_, at), rank = min(firsts)
            told = _sentence(execution, ranks[rank], at, rank, f"in step {number}{in_use}", right)
            wrong = ranks[rank][_scaled_before(ranks[rank], at)]
            return replace(told, trails=tuple(_trails(execution, answer, number, rank, wrong)))
        right.update(dict.fromkeys(WORDS[point.kind] for point in ranks[0]))
    return FirstWrong(_right(right, compared, in_use) if right else "")


def _right(right: dict[str, None], compared: Compared, in_use: str) -> str:
    rounded = () if compared.bits else tuple(WORDS[kind] for kind in ("gradient", "global norm", "global factor"))
    ordered = [word for word in WORDS.values() if word in right]
    exact, near = [w for w in ordered if w not in rounded], [w for w in ordered if w in rounded]
    more = f"; up to rounding: {', '.join(near)}" if near else ""
    return f"right, as far as they are compared bit for bit{in_use}: {', '.join(exact)}{more}"


WEIGHT: Final = "the weight of each sample"
"""The part of a gradient that is all of it times a number."""


def _trails(execution: Execution, answer: Answer, number: int, rank: int, wrong: Point) -> Iterator[tuple[str, Trail]]:
    """(part, where its numbers were seen): of the quantity itself, "", of the norms that parameters and modules have,
    and of what multiplies a gradient."""
    if wrong.element is None or not execution.request.values:
        return
    for part, got, wanted in _numbers(answer, number, wrong):
        found = trail(execution, Sought(rank, number, got, wanted, tensors=part != WEIGHT))
        if found is not None and (found.wrong or not part):
            yield part, found


def _numbers(answer: Answer, number: int, wrong: Point) -> Iterator[tuple[str, tuple[Number, ...], tuple[Number, ...]]]:
    assert wrong.element is not None
    step, got, wanted = answer.steps[number], wrong.element.got, wrong.element.wanted
    if wrong.kind in ("norms", "global norm"):
        yield "", with_square(got), with_square(wanted)
    else:
        yield "", _scaled(answer, got, wrong), _scaled(answer, wanted, wrong)
    if wrong.kind == "norms" and wrong.row >= 0 and answer.case.world_size == 1:  # else a rank may have its part alone
        more, squares = got * got - wanted * wanted, _squares(step, wrong.row)
        for name, part in _parts(squares).items():
            if part + more > 0 and part != sum(squares.values()):  # else it is the whole
                yield name, (Number(part + more, "the square of its part", 2.0**-40),), ()
    if wrong.kind in ("gradient", "local gradient") and wrong.times != 1.0:
        share = batches.share(answer.case, answer.arithmetic.averaging != "none")
        yield WEIGHT, (Number(wrong.times * share),), ()


def _scaled(answer: Answer, value: float, wrong: Point) -> tuple[Number, ...]:
    """What a quantity may be before it is averaged, or divided by N."""
    if wrong.kind == "global factor":
        return (Number(value, "", 2.0**-40),)
    if wrong.kind not in ("gradient", "local gradient"):
        return (Number(value),)
    case = answer.case
    times = {"": 1.0, "N times it": float(case.step.normaliser), "W times it": float(case.world_size)}
    return tuple(Number(value * factor, of, 2.0**-50 if of else 0.0) for of, factor in times.items())


def _squares(step: StepAnswer, row: int) -> dict[str, float]:
    """Squared norms of one sample's gradient by parameter."""
    return {name: float(gradient[row].square().sum()) for name, gradient in step.gradients.items()}


def _parts(squares: Mapping[str, float]) -> dict[str, float]:
    """``squares``, and their sums by module that has several."""
    modules: dict[str, list[float]] = {}
    for name, square in squares.items():
        modules.setdefault(name.rpartition(".")[0], []).append(square)
    return {**squares, **{name: sum(own) for name, own in modules.items() if len(own) > 1}}


def _place(points: Sequence[Point]) -> tuple[int, int]:
    """(where in a step the first wrong one belongs, its number)."""
    at = next(number for number, point in enumerate(points) if point.wrong)
    return ORDER.index(points[at].kind), at


def _sentence(
    execution: Execution, points: Sequence[Point], at: int, rank: int, when: str, right: dict[str, None]
) -> FirstWrong:
    """In words, with the lines around it."""
    at = _scaled_before(points, at)
    wrong, before = points[at], points[:at]
    until = dict.fromkeys([*right, *(WORDS[point.kind] for point in before)])
    until.pop(WORDS[wrong.kind], None)
    of = f" of {wrong.name}" if wrong.name else ""
    differs = ", ".join(part for part in (wrong.wrong, _multiple(wrong)) if part)
    words = [f"the first to differ, {when}: {WORDS[wrong.kind]}{of} on rank {rank}: {differs}"]
    if until:
        words.append(f"right until then: {', '.join(word for word in WORDS.values() if word in until)}")
    known = [point for point in reversed(before) if point.lines and _begins_before(point, wrong)]
    last = next((point for point in known if wrong.name and point.name == wrong.name), known[0] if known else None)
    if last is not None and last.lines != wrong.lines:
        words.append(f"last right at {line_of(last.lines[0])}")
        words += _between(execution, rank, last, wrong)
    if wrong.lines:
        behind = "by" if wrong.kind in _READ else "within" if last and last.lines == wrong.lines else "at"
        words.append(f"wrong {behind} {line_of(wrong.lines[0])}")
    elif wrong.kind == "updated" and not any(point.kind == "options" for point in points):
        words.append("no optimizer that the adapter was given has stepped on this rank")
    lines = wrong.lines or (last.lines if last else ())
    place = lines[0].partition(" ")[0] if lines else ""
    return FirstWrong("\n".join(words), place, wrong.kind, missing=wrong.wrong == MISSING)


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
    """The collectives between two quantities."""
    if last is not None and wrong.calls >= 0:
        calls = _calls(execution.ranks[rank].trace[last.calls : wrong.calls], wrong.name)
        yield from (f"in between: {one}" for one in calls)


def _calls(calls: Sequence[Collective], name: str) -> Iterator[str]:
    """Collectives in words, a line each, those of the unit that a parameter of this name is in if there are such."""
    own = [call for call in calls if call.subject and f".{call.subject}." in f".{name}."]
    told = [*dict.fromkeys(_call(call) for call in own or calls)]
    yield from told[:_CALLS]
    if len(told) > _CALLS:
        yield f"and {len(told) - _CALLS} more"


def _call(call: Collective) -> str:
    of = f" of {call.subject}" if call.subject else ""
    by = f", called at {line_of(call.called_at)}" if call.called_at else ""
    return f"{call.op}{of} at {line_of(call.where)}{by}"
