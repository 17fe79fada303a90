"""What a wrong observable is instead: common mistakes, each computed and compared as finely as the observable itself.

A cause is told only where what it predicts lies within the threshold of what the run has, and the observable itself
does not. So no cause is a guess: "is 4 times that of one rank" is a measured equality.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fsdpcheck.comparison.decision import Decision
from fsdpcheck.comparison.record import Key, Observation, Piece, order


class Cause(NamedTuple):
    """``text``: a sentence. ``word``: of the kind of mistake; "" of what is only said beside it."""

    word: str
    text: str


@dataclass(frozen=True)
class Evidence:
    """What a cause may look at. ``base``, ``whole``: values of both runs. ``run``: what ranks have recorded.

    ``decisions``: of the observables of the first wrong step, by key.
    """

    base: Mapping[Key, Tensor]
    whole: Mapping[Key, Tensor]
    run: Observation
    decisions: Mapping[Key, Decision]


def causes(first: Decision, evidence: Evidence) -> list[Cause]:
    """The most telling first; [] where nothing that is known explains the observable."""
    found = [*_nothing(first, evidence), *_factors(first, evidence), *_part_of_norm(first, evidence)]
    return [*found, *_before(first, evidence)]


def of_replicas(key: Key, base: Mapping[Key, Tensor], run: Observation, threshold: float) -> list[Cause]:
    """Of replicas that differ: whether together, or one of them, they are what one rank has."""
    wanted = base.get(key)
    own = _whole_pieces(key, run)
    if wanted is None or len(own) < 2:
        return []
    many = len(own)
    if any(piece.values.numel() not in (0, wanted.numel()) for piece in own.values()):
        return []
    values = {rank: piece.values.reshape(wanted.shape) for rank, piece in own.items() if piece.values.numel()}
    together = torch.stack([values[rank] for rank in sorted(values)])
    for name, candidate in (("average", together.mean(0)), ("sum", together.sum(0))):
        if _within(candidate, wanted, threshold):
            return [Cause("not reduced", f"the {name} of the {many} ranks' is what one rank has: nothing reduces them")]
    right = [rank for rank in sorted(values) if _within(values[rank], wanted, threshold)]
    if right:
        ranks = f"rank {', '.join(map(str, right))}"
        return [Cause("", f"{ranks} of {many} has what one rank has, the others have not")]
    return []


def of_copies(key: Key, differing: Collection[Key], seen: Collection[Key]) -> list[Cause]:
    """Of copies of ``key`` that differ: what kind of mistake that is.

    ``differing``: of all that differ between ranks. ``seen``: of all that was observed; a sparse gradient is not.
    """
    if key.kind == "norm":
        return [Cause("clip norm", "each rank clips by a norm of its own")]
    if key.kind == "final parameter":
        return [Cause("state", "no optimizer has it: what the script does with it by itself differs between ranks")]
    of_step = [other for other in differing if other.step == key.step]
    states = sorted({other.kind for other in of_step if other.kind.startswith("state ")})
    gradient = key._replace(kind="gradient")
    if key.kind == "parameter" and states and gradient in seen and gradient not in of_step:
        return [Cause("state", f"its gradient is equal on all ranks, and {', '.join(states)} of the optimizers is not")]
    return []


def _whole_pieces(key: Key, run: Observation) -> dict[int, Piece]:
    pieces = {rank: record.pieces[key] for rank, record in enumerate(run.ranks) if key in record.pieces}
    return {rank: piece for rank, piece in pieces.items() if piece.places is None and not piece.partial}


def _nothing(first: Decision, evidence: Evidence) -> Iterator[Cause]:
    got, wanted = evidence.whole.get(first.key), evidence.base.get(first.key)
    if first.key.kind == "initial parameter":
        yield Cause("random", "ranks begin with other parameters than one rank: they are drawn, or loaded, otherwise")
    if first.key.kind == "final parameter":
        yield Cause("state", "no optimizer has it, and all that optimizers have agrees: an average of weights, say")
    if got is None:
        yield Cause("missing", "no rank has it")
    elif wanted is None:
        yield Cause("", f"one rank has none; {evidence.run.world_size} ranks do")
    elif got.shape != wanted.shape:
        yield Cause("shape", f"its shape is {list(got.shape)}, where one rank has {list(wanted.shape)}")
    elif bool(got.isnan().any() > wanted.isnan().any()):
        yield Cause("", f"{int(got.isnan().sum())} of {got.numel()} entries are NaN")
    elif not got.any() and bool(wanted.any()):
        yield Cause("", "all of it is zero")


def _factors(first: Decision, evidence: Evidence) -> Iterator[Cause]:
    got, wanted = evidence.whole.get(first.key), evidence.base.get(first.key)
    if got is None or wanted is None or got.shape != wanted.shape or not bool(wanted.any()):
        return
    factor, name = _factor(got, wanted, first, evidence)
    if factor is None:
        return
    true, alike = _how_many(first, factor, evidence)
    norm = _norm_of(first.key.step, evidence) if first.key.kind == "gradient" and true == alike else None
    if norm is None:
        many = f", as {true} of {alike} are" if alike > 1 else ""
        yield Cause("factor" if true == alike else "", f"it is {name} times that of one rank{many}")
    elif _is_inverse(factor, norm, first):
        got_norm, wanted_norm = norm
        yield Cause("clip norm", f"gradients are {name} times those of one rank, for the norm that they are clipped by "
                    f"is {got_norm:.6g} and not {wanted_norm:.6g}")  # fmt: skip
    else:
        before = times(norm[0] / norm[1])
        yield Cause("factor", f"the norm before clipping is {before} times that of one rank; gradients then are {name} "
                    "times those of one rank")  # fmt: skip


def _factor(got: Tensor, wanted: Tensor, first: Decision, evidence: Evidence) -> tuple[float | None, str]:
    """The number by which all entries are multiplied, and what it is; None if there is none."""
    for factor, name in _candidates(evidence.run.world_size, evidence.run):
        if _within(got, wanted * float(factor), first.threshold * float(factor)):
            return float(factor), name
    measured = _common_factor(got, wanted, first)
    return measured, "" if measured is None else times(measured)


def times(factor: float) -> str:
    """A factor as text; one close to 1 by its distance from that."""
    off = factor - 1
    return f"1 {'+' if off > 0 else '-'} {abs(off):.2g}" if 0 < abs(off) < _CLOSE else f"{factor:.6g}"


_CLOSE: Final = 1e-4
"""Below this six digits would not show how far a factor is from 1."""


def _norm_of(step: int, evidence: Evidence) -> tuple[float, float] | None:
    """The norm of a step that differs, of the ranks and of one."""
    for key, decision in evidence.decisions.items():
        if key.kind == "norm" and key.step == step and decision.says == "differs":
            got, wanted = evidence.whole.get(key), evidence.base.get(key)
            if (
                got is not None
                and wanted is not None
                and got.numel() == wanted.numel() == 1
                and got.any()
                and wanted.any()
            ):
                return float(got), float(wanted)
    return None


def _is_inverse(factor: float, norm: tuple[float, float], first: Decision) -> bool:
    """Whether gradients are multiplied by what the norm is divided by, with torch's addend of clipping or without."""
    got, wanted = norm
    off = 2 * first.resolution
    return any(abs((wanted + more) / (got + more) / factor - 1) <= off for more in (0.0, _ADDED))


_ADDED: Final = 1e-6
"""What ``torch.nn.utils.clip_grads_with_norm_`` adds to the norm."""


def _common_factor(got: Tensor, wanted: Tensor, first: Decision) -> float | None:
    """The one number by which all entries are multiplied, if there is one; of a single entry any number would do."""
    if got.numel() < 2:
        return None
    factor = float((got * wanted).sum() / (wanted * wanted).sum())
    return factor if factor and _within(got, wanted * factor, first.threshold * max(abs(factor), 1.0)) else None


def _candidates(world_size: int, run: Observation) -> Iterator[tuple[Fraction, str]]:
    """Factors that mistakes about ranks have: sizes of groups that the run has used, and what follows from them."""
    sizes = {len(call.group) for trace in run.traces for call in trace if len(call.group) > 1} | {world_size}
    for size in sorted(sizes, reverse=True):
        what = "W" if size == world_size else "the size of a group,"
        yield Fraction(size), f"{what} = {size}" if what == "W" else f"{what} {size},"
        yield Fraction(1, size), f"1/{size}"
        yield Fraction(size * size), f"{size}^2"
        yield Fraction(1, size * size), f"1/{size}^2"


def _how_many(first: Decision, factor: float, evidence: Evidence) -> tuple[int, int]:
    """Of how many of this kind and step the same is true, and how many there are."""
    alike = [key for key in evidence.whole if key.step == first.key.step and key.kind == first.key.kind]
    true = 0
    for key in alike:
        got, wanted, decision = evidence.whole[key], evidence.base.get(key), evidence.decisions.get(key)
        if wanted is not None and decision is not None and got.shape == wanted.shape:
            true += _within(got, wanted * factor, decision.threshold * max(abs(factor), 1.0))
    return true, len(alike)


def _part_of_norm(first: Decision, evidence: Evidence) -> Iterator[Cause]:
    """Of a norm: whether it is that of one rank's part of the gradients. Clipping scales both by one factor."""
    if first.key.kind != "norm":
        return
    got, wanted = evidence.whole.get(first.key), evidence.base.get(first.key)
    grads = {
        key: value for key, value in evidence.base.items() if key.kind == "gradient" and key.step == first.key.step
    }
    if got is None or wanted is None or not grads or not float(wanted):
        return
    total = torch.stack([value.double().norm() for value in grads.values()]).norm()
    for rank, record in enumerate(evidence.run.ranks):
        parts = [record.pieces[key].values.double().norm() for key in grads if key in record.pieces]
        if parts and _within(got * total, wanted * torch.stack(parts).norm(), first.threshold * float(total)):
            yield Cause("clip norm", f"it is the norm of rank {rank}'s part of the gradients alone")
            return


def _before(first: Decision, evidence: Evidence) -> Iterator[Cause]:
    """Which kinds of observables of that step were still right."""
    says: dict[str, set[str]] = {}
    for key, decision in evidence.decisions.items():
        if order(key)[:2] < order(first.key)[:2]:
            says.setdefault(key.kind, set()).add(decision.says)
    right = [kind for kind, those in says.items() if those == {"agrees"}]
    if right:
        kinds = ", ".join(f"{kind}s" for kind in right)
        yield Cause("", f"what comes before it in this step agrees: {kinds}")


def _within(one: Tensor, other: Tensor, threshold: float) -> bool:
    return one.shape == other.shape and bool(((one - other).abs() <= threshold).all())
