"""How a gradient is put together of the ranks' own parts: each part's weight, found by solving for it.

A reduction, an accumulation and a division make one weighted sum of what each rank's backwards give. So of a wrong
gradient the weights tell whether a part is missing, counts too much, or is not what one rank has a share of. They are
reported only where they are determined: where the sum lies as close to the gradient as rounding does, and no other
weights do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fsdpcheck.comparison.causes import Cause, times
from fsdpcheck.comparison.decision import Decision
from fsdpcheck.comparison.record import Key, Observation

Part = tuple[int, int]
"""(rank, which backward of the step)."""
_SHOWN: Final = 8


@dataclass(frozen=True)
class Weights:
    """By part its weight, and how far each may be off."""

    of: Mapping[Part, float]
    uncertain: float

    def are_equal(self, one: float, other: float) -> bool:
        return abs(one - other) <= 2 * self.uncertain

    def common(self) -> float | None:
        """The weight of all parts, if it is one."""
        least, most = min(self.of.values()), max(self.of.values())
        return (least + most) / 2 if self.are_equal(least, most) and not self.are_equal(most, 0.0) else None

    def is_plain(self, value: float) -> bool:
        """Whether a weight is a whole number, or one over a whole number."""
        large = max(abs(value), 1 / abs(value))
        return abs(large - round(large)) <= 2 * self.uncertain * large * max(large, 1.0)


def parts_of(run: Observation, step: int, names: Sequence[str]) -> dict[Part, Tensor]:
    """What each backward of each rank gives as the gradients of these parameters, one after the other.

    A parameter that a backward gives no gradient has zeros there. Empty where a part is not the whole of its parameter.
    """
    found: dict[Part, dict[str, Tensor]] = {}
    for rank, record in enumerate(run.ranks):
        for key, piece in record.pieces.items():
            if key.step == step and key.kind.startswith("part ") and key.name in names:
                if piece.places is not None or piece.partial:
                    return {}
                found.setdefault((rank, int(key.kind.removeprefix("part "))), {})[key.name] = piece.values
    sizes = {name: values.numel() for each in found.values() for name, values in each.items()}
    if set(sizes) != set(names):
        return {}
    zeros = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
    return {part: torch.cat([{**zeros, **found[part]}[name] for name in names]) for part in sorted(found)}


def weights(parts: Mapping[Part, Tensor], gradient: Tensor, thresholds: Tensor) -> Weights | None:
    """The weights with which the parts add up to a gradient; None where there are none, or more than one set of them.

    ``gradient``, ``thresholds``: of the same entries as the parts, the latter how far rounding moves each.
    """
    if len(gradient) < len(parts):
        return None
    columns = torch.stack(list(parts.values()), dim=1)
    left, sizes, right = torch.linalg.svd(columns, full_matrices=False)
    within = float(thresholds.norm())
    if not float(sizes[-1]) > 0:
        return None
    found = right.T @ ((left.T @ gradient) / sizes)
    uncertain = within / float(sizes[-1])
    if float((columns @ found - gradient).norm()) > within or 4 * uncertain > float(found.abs().max()):
        return None
    return Weights(dict(zip(parts, found.tolist(), strict=True)), uncertain)


@dataclass(frozen=True)
class PartsOfGradients:
    """``run``: in which parts were kept. ``base``, ``whole``: values of one rank, and of the ranks together."""

    run: Observation
    base: Mapping[Key, Tensor]
    whole: Mapping[Key, Tensor]

    def causes(self, wrong: Sequence[Decision]) -> Iterator[Cause]:
        """What gradients of one step, all of which differ, are made of: together, or else the first that tells most."""
        found = self._told(wrong)
        if len(wrong) > 1 and not any(cause.word for cause in found):
            each = [(one.key.name, cause) for one in wrong[:_SHOWN] for cause in self._told([one]) if cause.word]
            each.sort(key=lambda named: named[1].word in ("factor", "forward"))
            found = [cause._replace(text=f"of {name}: {cause.text}") for name, cause in each[:1]] or found
        yield from found

    def clipped(self, wrong: Sequence[Decision]) -> Iterator[Cause]:
        """Of gradients that all are multiplied by one factor: whether that is another clipping.

        What is neither clipped nor scaled weighs its parts by a whole number, or by one over a whole number; so does a
        mistake about the number of ranks or of micro-batches.
        """
        wanted, got = self._weights(wrong)
        if wanted is None or got is None:
            return
        one, other = (each.common() for each in (wanted, got))
        if one is None or other is None:
            return
        ratio = Weights({}, (got.uncertain + wanted.uncertain * abs(other / one)) / abs(one))
        if wanted.is_plain(one) and (got.is_plain(other) or ratio.is_plain(other / one)):
            return
        yield Cause("clip norm", f"each rank's part weighs {other:.6g}, where one rank has it weigh {one:.6g}: "
                    "they are clipped, or scaled, by numbers that are not the same")  # fmt: skip

    def _told(self, wrong: Sequence[Decision]) -> list[Cause]:
        return list(causes(*self._weights(wrong)))

    def _weights(self, wrong: Sequence[Decision]) -> tuple[Weights | None, Weights | None]:
        """Those of one rank, and those of the ranks."""
        wrong = [each for each in wrong if each.key in self.base and each.key in self.whole]
        parts = self._parts(wrong)
        if not parts:
            return None, None
        thresholds = _thresholds(wrong, self.base)
        one, other = (weights(parts, _flat(values, wrong), thresholds) for values in (self.base, self.whole))
        return one, other

    def of_replicas(self, wrong: Decision) -> Iterator[Cause]:
        """What a gradient is made of on each of the ranks, which have not the same."""
        parts = self._parts([wrong])
        pieces = {rank: record.pieces.get(wrong.key) for rank, record in enumerate(self.run.ranks)}
        values = [(rank, piece.values) for rank, piece in pieces.items() if piece is not None and piece.places is None]
        if not parts or len(values) < len(self.run.ranks):
            return
        thresholds = _thresholds([wrong], self.base)
        by_rank = {rank: weights(parts, value, thresholds) for rank, value in values}
        known = {rank: found for rank, found in by_rank.items() if found is not None}
        if len(known) == len(by_rank):
            yield from of_replicas(known)

    def _parts(self, wrong: Sequence[Decision]) -> dict[Part, Tensor]:
        return parts_of(self.run, wrong[0].key.step, [each.key.name for each in wrong]) if wrong else {}


def _flat(values: Mapping[Key, Tensor], wrong: Sequence[Decision]) -> Tensor:
    return torch.cat([values[each.key].reshape(-1) for each in wrong])


def _thresholds(wrong: Sequence[Decision], values: Mapping[Key, Tensor]) -> Tensor:
    each = [torch.full((values[one.key].numel(),), one.threshold, dtype=torch.float64) for one in wrong]
    return torch.cat(each)


def causes(wanted: Weights | None, got: Weights | None) -> Iterator[Cause]:
    """What a wrong gradient is made of. ``wanted``: the weights of what one rank has, ``got``: of what ranks have."""
    if got is not None and wanted is None:
        yield Cause("forward", "it is a weighted sum of the ranks' own parts, and no such sum is what one rank has: "
                    "a forward or a backward differs, not the reduction")  # fmt: skip
    elif wanted is not None and got is None:
        yield Cause("", "the ranks' own parts can be added up to what one rank has: what becomes of them is wrong")
    elif wanted is not None and got is not None:
        if _lost(got, wanted):
            yield from _of_base(wanted, got)
        else:
            yield from _missing(wanted, got) if _lost(wanted, got) else _unequal(wanted, got)


def of_replicas(by_rank: Mapping[int, Weights]) -> Iterator[Cause]:
    """What gradients are made of that differ between ranks which should have equal ones."""
    ranks = sorted({rank for one in by_rank.values() for rank, _ in one.of})
    whose = {
        rank: frozenset(other for (other, _), value in one.of.items() if not one.are_equal(value, 0.0))
        for rank, one in by_rank.items()
    }
    if all(those == {rank} for rank, those in whose.items()):
        yield Cause("not reduced", "each rank has its own part alone: nothing reduces them")
        return
    groups = sorted(set(whose.values()), key=sorted)
    if all(len(those) < len(ranks) for those in groups):
        told = "; ".join(
            f"{_named(rank for rank in whose if whose[rank] == those)} of {_named(those)}" for those in groups[:_SHOWN]
        )
        yield Cause("wrong group", f"each is reduced over some ranks: those of {told}")
        return
    own = {
        backward
        for rank, one in by_rank.items()
        for (other, backward), value in one.of.items()
        if other != rank and one.are_equal(value, 0.0)
    }
    if own:
        yield Cause("not reduced", f"each rank has only its own of {_backwards(own)} not reduced")


def _lost(wanted: Weights, got: Weights) -> set[Part]:
    """Parts that the one has and the other has not."""
    return _zeros(got) - _zeros(wanted)


def _of_base(wanted: Weights, got: Weights) -> Iterator[Cause]:
    """One rank's gradient has not all that the ranks have."""
    parts, last = sorted(wanted.of), max(backward for _, backward in wanted.of)
    kept = {part for part in parts if not wanted.are_equal(wanted.of[part], 0.0)}
    if kept == {parts[-1]} and all(backward == last for rank, backward in set(parts) - _zeros(got)):
        lost = "one rank's gradient is that of its last backward alone, and the ranks' that of the last of each"
        yield Cause("last micro-batch only", f"{lost}: earlier ones are lost")
    else:
        yield Cause("micro-batches", f"one rank's gradient has {len(kept)} of the ranks' {len(parts)} parts alone")


def _zeros(found: Weights) -> set[Part]:
    return {part for part, value in found.of.items() if found.are_equal(value, 0.0)}


def _missing(wanted: Weights, got: Weights) -> Iterator[Cause]:
    lost = _lost(wanted, got)
    ranks = sorted({rank for rank, _ in wanted.of})
    none_of = [rank for rank in ranks if all(part in lost for part in wanted.of if part[0] == rank)]
    left = [rank for rank in ranks if rank not in none_of]
    if len(left) == 1:
        yield Cause("one rank", f"it is the part of {_named(left)} alone, of {len(ranks)}")
    elif len(none_of) == 1:
        yield Cause("one rank", f"the part of {_named(none_of)} is missing")
    elif none_of:
        yield Cause("wrong group", f"it has the parts of {_named(left)} alone, of {len(ranks)}")
    else:
        backwards, last = {backward for _, backward in lost}, max(backward for _, backward in wanted.of)
        of_all = all((rank, backward) in lost for rank in ranks for backward in backwards)
        if of_all and backwards == set(range(last)):
            yield Cause("last micro-batch only", f"of {last + 1} backwards of each rank only the last counts")
        elif of_all:
            yield Cause("micro-batches", f"of each rank {_backwards(backwards, ' ')} missing")
        else:
            told = ", ".join(f"backward {backward} of rank {rank}" for rank, backward in sorted(lost)[:_SHOWN])
            yield Cause("micro-batches", f"parts are missing: {told}")


def _unequal(wanted: Weights, got: Weights) -> Iterator[Cause]:
    ratio = {part: got.of[part] / wanted.of[part] for part in got.of if not wanted.are_equal(wanted.of[part], 0.0)}
    off = max((got.uncertain + wanted.uncertain * abs(ratio[part])) / abs(wanted.of[part]) for part in ratio)
    ratios = Weights(ratio, off)
    usual = sorted(ratio.values())[len(ratio) // 2]
    others = sorted({rank for (rank, _), value in ratio.items() if not ratios.are_equal(value, usual)})
    if not others:
        yield Cause("factor", f"each rank's part counts {times(usual)} times")
        return
    of_rank = {rank: [value for (other, _), value in ratio.items() if other == rank] for rank, _ in ratio}
    is_of_ranks = all(ratios.are_equal(min(values), max(values)) for values in of_rank.values())
    if is_of_ranks and len(others) == 1 and len(of_rank) > 2:
        factor = of_rank[others[0]][0] / usual
        yield Cause(
            "one rank", f"the part of rank {others[0]} counts {times(factor)} times as much as those of the others"
        )
        return
    yield Cause("weighting", f"the ranks' parts weigh {_shown(got)}; what one rank has is {_shown(wanted)} of them")


def _shown(found: Weights) -> str:
    values = [f"{value:.4g}" for value in found.of.values()]
    return ", ".join(values[:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")


def _named(ranks: Iterator[int] | Sequence[int] | frozenset[int]) -> str:
    found = sorted(ranks)
    return f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


def _backwards(found: set[int], then: str = ", which ") -> str:
    many = len(found) > 1
    return f"backward{'s' * many} {', '.join(map(str, sorted(found)))}{then}{'are' if many else 'is'}"
