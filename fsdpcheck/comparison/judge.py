"""One number of ranks against the base: by exact facts in float64, by numbers there, by facts in its own precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from fsdpcheck.comparison import causes, facts, losses
from fsdpcheck.comparison.causes import Cause
from fsdpcheck.comparison.contributions import PartsOfGradients
from fsdpcheck.comparison.decision import COARSEST, Decision, decided
from fsdpcheck.comparison.distances import between
from fsdpcheck.comparison.facts import Fact
from fsdpcheck.comparison.flips import first_flip
from fsdpcheck.comparison.kept_runs import Runs, with_noise
from fsdpcheck.comparison.precision.arithmetic import Arithmetic
from fsdpcheck.comparison.precision.randomness import BATCH_STATISTICS
from fsdpcheck.comparison.record import Key, Observation
from fsdpcheck.comparison.results import World
from fsdpcheck.comparison.rounding_bound import factor, spread
from fsdpcheck.comparison.runs import Run

NOISY: Final = 4
"""Noisy runs of each world at first. More make the threshold lower (rounding_bound.py)."""
CONFIRMING: Final = 8
"""Further noisy runs before a script is said to differ by what one noisy run alone would not show, and before it is
undecidable where a threshold so much lower would decide."""
_EPS: Final = {"float64": 2.0**-52, "own": 2.0**-23}
Pair = tuple[Run, Run]
"""A run of the base, and one of the world that is judged, in one arithmetic."""


def raised(size: int) -> Run:
    """In float64 in place of the script's own types."""
    return Run(size, Arithmetic("float64"))


def is_judged(key: Key) -> bool:
    """Whether an observable is decided by its numbers. Options are exact; losses are each rank's own."""
    return not key.kind.startswith(("loss", "option "))


@dataclass(frozen=True)
class Judge:
    """Judges ``size`` ranks. ``false_alarm``: the probability of accusing them if they are honest.

    ``batch_statistics``: False to judge runs in which BatchNorm computes by its running averages.
    """

    runs: Runs
    size: int
    false_alarm: float
    batch_statistics: bool = True

    @property
    def own(self) -> Pair:
        """In the script's own precision."""
        return self._pair("own")

    @property
    def raised(self) -> Pair:
        """In float64."""
        return self._pair("float64")

    def _pair(self, precision: Literal["own", "float64"]) -> Pair:
        arithmetic = Arithmetic(precision, batch_statistics=self.batch_statistics)
        return Run(self.runs.base, arithmetic), Run(self.size, arithmetic)

    def world(self) -> World:
        """What is said of them."""
        done = self.runs.done
        self.runs.get([*self.own, *self.raised])
        if (failure := done[self.own[1]].failure) is not None:
            return World(self.size, "fails", failure)
        unraised = next((done[run].failure for run in self.raised if done[run].failure is not None), None)
        if unraised is not None:
            why = f"in float64 it fails: {unraised.text.splitlines()[0]}"
            return self._by_facts(self.own) or World(self.size, "undecidable", causes=(Cause("", why),))
        first = facts.first(self._facts(self.raised))
        fact = self._by_facts(self.raised)
        if fact is not None and first is not None and first.kind not in facts.GIVEN:
            return fact
        if self.batch_statistics and (normalized := self._own_statistics()):
            other = replace(self, batch_statistics=False).world()
            return replace(other, warning=f"BatchNorm has statistics of each rank's own rows, at {normalized}")
        world = self._by_numbers(first)
        if world.says != "agrees":
            return world
        return fact or self._by_facts(self.own) or world

    def _own_statistics(self) -> str:
        """The line of a BatchNorm whose statistics are each rank's own, in ranks that differ; "" if there is none."""
        of_ranks = (note for record in self.runs.done[self.raised[1]].ranks for note in record.notes)
        lines = [note.removeprefix(f"{BATCH_STATISTICS} at ") for note in of_ranks if note.startswith(BATCH_STATISTICS)]
        differs = lines and any(decision.says == "differs" for decision in self._decided(self.raised, NOISY))
        return lines[0] if differs else ""

    def _facts(self, pair: Pair) -> list[Fact]:
        done, (one, this) = self.runs.done, pair
        return facts.differing(done[one], self.runs.whole(one), done[this], self.runs.whole(this))

    def _by_facts(self, pair: Pair) -> World | None:
        """What differs exactly and needs no numbers to confirm it, if anything does."""
        fact = facts.first(each for each in self._facts(pair) if each.kind not in facts.GIVEN)
        if fact is None:
            return None
        told = self._of_replicas(fact.key) if fact.kind == "replicas" and pair == self.raised else []
        if pair == self.own:
            told = [Cause("", "in float64 nothing differs")]
        world = World(self.size, "differs", fact=fact, causes=tuple(told))
        return _placed(world, fact.key, self.runs.done[pair[1]])

    def _of_replicas(self, key: Key | None) -> list[Cause]:
        """What replicas that differ are, together and each, as finely as noise lets one say."""
        found = self._decided(self.raised, NOISY, lambda other: other == key)
        if key is None or not found:
            return []
        one, this = self.raised
        told = causes.of_replicas(key, self.runs.values(one), self.runs.done[this], found[0].threshold)
        if not told and key.kind == "gradient":
            return list(self._parts.of_replicas(found[0]))
        whole = self.runs.whole(this)
        return [*causes.of_copies(key, whole.replicas, whole.values), *told]

    @property
    def _parts(self) -> PartsOfGradients:
        """What gradients are made of, by a run that keeps each rank's parts."""
        one, this = self.raised
        watched = replace(this, parts=True)
        self.runs.get([watched])
        return PartsOfGradients(self.runs.done[watched], self.runs.values(one), self.runs.values(this))

    def _decided(
        self, pair: Pair, many: int, judged: Callable[[Key], bool] = is_judged, *, as_of: int = 0
    ) -> list[Decision]:
        """``as_of``: count what the noisy runs show as if there were only so many of them.

        One half of the probability of a false alarm is for what is said at first, the other for what more noise says.
        """
        eps, noise = _EPS[pair[0].arithmetic.precision], self.runs.noise(pair, many)
        one, this = (self.runs.values(run) for run in pair)
        exact = self.runs.exact_in(pair)
        return decided(one, this, replace(noise, runs=as_of or noise.runs), eps, self.false_alarm / 2, judged, exact)

    def _confirmed(self, found: list[Decision]) -> list[Decision]:
        """The same by more noise, where that may say something else."""
        if self._is_doubtful(found):
            self.runs.confirmed = True
        elif not self._is_nearly_decided(found):
            return found
        return self._decided(self.raised, NOISY + CONFIRMING)

    def _is_doubtful(self, found: list[Decision]) -> bool:
        """Whether something differs, and its first would not by a single noisy run."""
        first = next((each.key for each in found if each.says == "differs" and each.why != "exact"), None)
        if first is None or self.runs.confirmed:
            return False
        alone = self._decided(self.raised, NOISY, as_of=1)
        return not any(each.key == first and each.says == "differs" for each in alone)

    def _is_nearly_decided(self, found: list[Decision]) -> bool:
        """Whether nothing differs, and the threshold of more noise would decide all that is undecidable."""
        those = [each for each in found if each.says == "undecidable"]
        if not those or any(each.says == "differs" for each in found):
            return False
        more, now = (factor(many, 1, len(found), self.false_alarm / 2) for many in (NOISY + CONFIRMING, NOISY))
        return all(each.threshold * more / now <= COARSEST * each.size for each in those)

    def _by_numbers(self, given: Fact | None) -> World:
        """``given``: the first fact that differs. Of what ranks are given, it is reported where numbers differ too."""
        one, this = (self.runs.values(run) for run in self.raised)
        exact = self.runs.exact_in(self.raised)
        moved = any(distance.apart for key, distance in between(one, this).items() if key not in exact)
        found = self._confirmed(self._decided(self.raised, NOISY if moved else 0))
        wrong = [decision for decision in found if decision.says == "differs"]
        undecidable = tuple(decision for decision in found if decision.says == "undecidable")
        agreeing = [decision for decision in found if decision.says == "agrees"]
        world = World(
            self.size,
            fact=given if wrong or undecidable else None,
            says="differs" if wrong else "undecidable" if undecidable else "agrees",
            undecidable=undecidable,
            observables=len(found),
            exact=sum(decision.why == "exact" for decision in found),
            ended=self._ended(),
            equal=sum(decision.apart == 0 for decision in found),
            differing=len(wrong),
            resolution=max((decision.resolution for decision in agreeing if decision.apart), default=0.0),
        )
        if wrong:
            return self._explained(world, found, wrong[0])
        return replace(world, precision=self._precision(found), causes=self._unsteady() if undecidable else ())

    def _unsteady(self) -> tuple[Cause, ...]:
        """Why nothing can be decided: with noise a world fails, or an operator chooses otherwise."""
        done = self.runs.done
        for run in self.raised:
            for noisy in with_noise(run, NOISY):
                if noisy in done and (failure := done[noisy].failure) is not None:
                    return (Cause("", f"with noise of rounding it fails: {failure.text.splitlines()[0]}"),)
        told = (first_flip(done[run], [done[noisy] for noisy in with_noise(run, NOISY)]) for run in self.raised)
        return tuple(Cause("", text) for text in dict.fromkeys(filter(None, told)))[:1]

    def _ended(self) -> str:
        """Where exactness ended, in the base if it did there."""
        base, run = ([record.ended for record in self.runs.done[each].ranks if record.ended] for each in self.raised)
        return base[0] if base else f"{run[0]}, on {self.size} ranks alone" if run else ""

    def _explained(self, world: World, found: Sequence[Decision], first: Decision) -> World:
        """A world that differs, with what can be said of the first observable that does."""
        one, this = self.raised
        step = {decision.key: decision for decision in found if decision.key.step == first.key.step}
        alike = [decision for decision in step.values() if decision.key.kind == first.key.kind]
        names = tuple(decision.key.name for decision in alike if decision.says == "differs")
        evidence = causes.Evidence(self.runs.values(one), self.runs.values(this), self.runs.done[this], step)
        told = list(causes.causes(first, evidence))
        named = next((cause.word for cause in told if cause.word), "")
        has_norm = any(key.kind == "norm" for key in step)  # then it says itself whether clipping is wrong
        if first.key.kind == "gradient" and (not named or (named == "factor" and not has_norm)):
            wrong = [each for each in alike if each.says == "differs"]
            told = [*(self._parts.clipped(wrong) if named else self._parts.causes(wrong)), *told]
        told += self._losses(first.key.step)
        world = replace(
            world,
            first=first,
            alike=names,
            of_alike=len(alike),
            causes=tuple(sorted(told, key=lambda cause: not cause.word)),
        )
        return _placed(world, first.key, self.runs.done[this])

    def _losses(self, step: int) -> Iterator[Cause]:
        """What the losses of a step say, as finely as noise lets them be told apart."""
        found = self._decided(self.raised, NOISY, lambda key: key.kind.startswith("loss "))
        agree = {decision.key for decision in found if decision.says != "differs"}
        one, this = (self.runs.whole(run) for run in self.raised)
        return losses.told(step, one, this, agree.__contains__)

    def _precision(self, raised: Sequence[Decision]) -> Decision | None:
        """The first observable that differs in the script's own precision by more than its noise there.

        To first order noise grows as eps does: what lies as close as that of float64 would have it needs no runs.
        """
        one, this = (self.runs.values(run) for run in self.own)
        apart, scale = between(one, this), _EPS["own"] / _EPS["float64"]
        within = {
            each.key: each.noise * scale * factor(math.inf, one[each.key].numel(), len(raised), self.false_alarm)
            for each in raised
            if each.key in one
        }
        if all(distance.apart <= within.get(key, 0.0) for key, distance in apart.items() if is_judged(key)):
            return None
        found = self._decided(self.own, NOISY)
        return next((each for each in found if each.says == "differs"), None) or self._lower(found)

    def _lower(self, found: Sequence[Decision]) -> Decision | None:
        """The first observable that noise moves further on these ranks than on the base, by more than chance explains.

        Noise is as large as the precision that an operation has: so something is computed in a lower one.
        """
        one, this = (self.runs.noise((run, run), NOISY).largest for run in self.own)
        eps = _EPS["own"]
        for each in found:
            least = max(one.get(each.key, 0.0), eps * each.size)
            entries = self.runs.values(self.own[0])[each.key].numel()
            if this.get(each.key, 0.0) > least * spread(NOISY, entries, len(found), self.false_alarm):
                return replace(each, says="differs", apart=this[each.key], noise=least, why="lower precision")
        return None


def _placed(world: World, key: Key | None, run: Observation) -> World:
    """With the script's line at which an observable was seen, and the collective before it."""
    for rank, record in enumerate(run.ranks):
        if key is not None and key in record.pieces:
            before = run.traces[rank][: record.calls.get(key, 0)]
            call = f"{before[-1]}, at {before[-1].where}" if before else ""
            return replace(world, line=record.lines.get(key, ""), call=call)
    return world
