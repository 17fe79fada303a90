"""A distinguishing test: an adversary sees whole trainings, with one record and without, and tells them apart or not.

It is the one check that knows nothing of clipping and noise. Half of the trainings teach the adversary where to look;
on the others it says which had the record. If noise multiplier and steps are those asked for, no adversary can do
better than the Gaussian mechanism lets it: with sensitivity k C and standard deviation s C, in K steps, two normal
distributions with means mu = k sqrt(K) / s apart. Source: Dong, Roth, Su 2019, arXiv:1905.02383, theorem 2.7 and
corollary 3.3.

Legend: T trainings of one kind, d numbers that a training shows, s the noise multiplier, K steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from statistics import NormalDist
from typing import Final

import torch
from torch import Tensor

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks._read import completed
from fsdpcheck.checks.noise import FALSE_ALARM
from fsdpcheck.exact import binomial
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import PATTERN, Cause, Causes
from fsdpcheck.findings.violation import Violation

TAUGHT: Final = 24
"""Trainings of each kind that teach the adversary."""
JUDGED: Final = 48
"""Those that it judges: if it is never wrong, mu is above 1.2 but by ``FALSE_ALARM``."""
LARGE: Final = 2.0**20
"""Targets of the canary: the norm of its gradient is far above any clip norm, so that nothing hides it but clipping."""
_STEPS, _MULTIPLIER, _OTHERS = 2, 3.0, 1
_LARGEST_WORLD: Final = 3
_HALVINGS: Final = 60


def trials(features: Features, world_sizes: tuple[int, ...]) -> list[TrainingCase]:
    """Cases of small models whose last record is the canary, on the fewest ranks and on the most of up to three.

    Every rank has a record besides. On several ranks in two micro-batches, where they and ranks without samples in one
    of them are accepted.
    """
    worlds = sorted({size for size in world_sizes if size <= _LARGEST_WORLD}) or [min(world_sizes)]
    found = []
    for world in dict.fromkeys((worlds[-1], worlds[0])):
        count = _OTHERS * world
        lists = [tuple(range(rank * _OTHERS, (rank + 1) * _OTHERS)) for rank in range(world)]
        layout = BatchLayout("listed", count + 1, lists=(*lists[:-1], (*lists[-1], count)))
        twice = world > 1 and {"micro-batches", "empty-rank"} <= features.accepts
        step = StepSpec(
            steps=_STEPS,
            micro_batches=1 + twice,
            normaliser=4 * world,
            clipping="probe",
            clip_norm=2,
            noise_multiplier=_MULTIPLIER,
        )
        model = ModelSpec((LayerSpec(world, bias="bias" in features.accepts),), features=1)
        case = TrainingCase(model, MeshSpec(world), layout, step, seed=1)
        found += [case] if features.takes(case) else []
    return found


def without_canary(case: TrainingCase) -> TrainingCase:
    """The case without its last record."""
    last = case.layout.batch_size - 1
    lists = tuple(tuple(record for record in own if record != last) for own in case.layout.lists)
    return replace(case, layout=replace(case.layout, lists=lists))


def canaries(case: TrainingCase) -> tuple[tuple[int, float], ...]:
    """The canary of each step, and its targets: see RunRequest.spoiled."""
    size = case.layout.batch_size
    return tuple(((step + 1) * size - 1, LARGE) for step in range(case.step.steps))


def assert_not_told_apart(case: TrainingCase, pairs: Iterable[tuple[Execution, Execution]]) -> None:
    """Nobody who was taught by the first ``TAUGHT`` trainings tells the next ``JUDGED`` apart better than noise allows.

    ``pairs``: of a training with the record and one without it, both kinds in one order. No more are taken than decide:
    if all that are left were told apart, and still no more than is allowed, they are not asked for.
    Honest trainings are called wrong with probability ``FALSE_ALARM`` at most. Every rank is looked at on its own.
    """
    allowed = math.sqrt(case.step.steps) / case.step.noise_multiplier
    adversaries = [_Adversary(rank, float(FALSE_ALARM) / case.world_size) for rank in range(case.world_size)]
    for pair in itertools.islice(pairs, TAUGHT + JUDGED):
        for adversary in adversaries:
            adversary.see(*pair)
        if all(map(partial(_is_decided, allowed), adversaries)):
            return
    for adversary in adversaries:
        if (found := adversary.most()) > allowed:
            raise Violation(
                "trainings with one record and without it are told apart",
                got=f"{adversary.hits} of {JUDGED} trainings with the record, and {adversary.alarms} of {JUDGED}"
                f" without it, are said to have it: two normal distributions {found:.3f} apart at least",
                wanted=f"at most {allowed:.3f}, sqrt(steps) / noise multiplier",
                where=f"rank {adversary.rank}, parameters after all steps",
                cause=partial(_causes, *map(torch.stack, adversary.seen)),
            )


@dataclass
class _Adversary:
    """Who sees what one rank shows, of trainings with the record and of others, and says which are which."""

    rank: int
    alarm: float
    """The chance with which its bound may be wrong."""
    seen: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    hits: int = 0
    alarms: int = 0
    _told_by: tuple[Tensor, float] | None = None

    def see(self, present: Execution, absent: Execution) -> None:
        one, other = (_shown(run, self.rank) for run in (present, absent))
        if self._told_by is not None:
            direction, threshold = self._told_by
            self.hits += bool(one @ direction > threshold)
            self.alarms += bool(other @ direction > threshold)
        for rows, row in zip(self.seen, (one, other), strict=True):
            rows.append(row)
        if len(self.seen[0]) == TAUGHT:
            self._told_by = _taught(*map(torch.stack, self.seen))

    def most(self) -> float:
        """The bound at the end (see ``apart``), if it is right about all that it has not seen yet."""
        left = JUDGED - max(0, len(self.seen[0]) - TAUGHT)
        return apart(self.hits + left, JUDGED, self.alarms, JUDGED, self.alarm)


def _is_decided(allowed: float, adversary: _Adversary) -> bool:
    return adversary.most() <= allowed


@lru_cache(maxsize=1024)
def apart(hits: int, of: int, alarms: int, among: int, alarm: float) -> float:
    """A lower bound on mu, if so many events are seen with the record and without it; wrong with chance ``alarm``."""
    least = _least(hits, of, alarm / 2)
    most = 1 - _least(among - alarms, among, alarm / 2)
    if least <= most:
        return 0.0
    phi = NormalDist()
    return phi.inv_cdf(least) - phi.inv_cdf(most)


def _least(hits: int, of: int, alarm: float) -> float:
    """The probability below which ``hits`` of ``of`` events or more have a chance of ``alarm`` at most."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial.above(hits, of, middle) <= alarm else (low, middle)
    return low


def _shown(run: Execution, rank: int) -> Tensor:
    """All that a rank shows of its parameters after each step, [d]: the numbers, and which of them are finite."""
    steps = completed(run)[rank].steps
    shown = torch.cat([value.double().flatten() for step in steps for value in step.params.values()])
    return torch.cat([shown.nan_to_num(0.0, 0.0, 0.0), shown.isfinite().double()])


def _taught(one_Td: Tensor, other_Td: Tensor) -> tuple[Tensor, float]:
    """(direction [d], threshold) that tell these apart best: Fisher's, which finds what noise leaves bare too."""
    means = one_Td.mean(0), other_Td.mean(0)
    rest = torch.cat([one_Td - means[0], other_Td - means[1]])
    scale = torch.maximum(rest.abs().amax(0), (means[0] - means[1]).abs())
    scale = torch.where(scale > 0, scale, 1.0)
    rest = rest / scale
    spread = rest.T @ rest / len(rest)
    ridge = torch.eye(len(spread), dtype=torch.float64) * torch.finfo(torch.float64).eps * len(rest)
    direction = torch.linalg.solve(spread + ridge, (means[0] - means[1]) / scale) / scale
    return direction, float((means[0] + means[1]) @ direction / 2)


def _causes(one_Td: Tensor, other_Td: Tensor) -> Causes:
    return list(_fitting(one_Td, other_Td))


def _fitting(one_Td: Tensor, other_Td: Tensor) -> Iterator[Cause]:
    if bool((other_Td == other_Td[0]).all()):
        yield Cause("always alike", "all trainings end alike, whatever the seed of the noise: there is none", PATTERN)
    distance = float((one_Td.mean(0) - other_Td.mean(0)).norm())
    spread = float((other_Td - other_Td.mean(0)).square().sum(1).mean().sqrt())
    if distance > LARGE / 2**8 * max(spread, 2.0**-40):
        yield Cause("not clipped", "the record moves parameters as far as it would without clipping", PATTERN)
