"""Compare: a script on each number of ranks against itself on the first, from observation to verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from fsdpcheck.comparison import causes, facts, losses
from fsdpcheck.comparison.command_line import CommandLine
from fsdpcheck.comparison.decision import Decision, Noise, Values, decided, noise_of
from fsdpcheck.comparison.distances import between
from fsdpcheck.comparison.facts import Fact
from fsdpcheck.comparison.observation.whole import Assembled, assembled
from fsdpcheck.comparison.precision.arithmetic import Arithmetic
from fsdpcheck.comparison.record import Key, Observation, order
from fsdpcheck.comparison.rounding_bound import FALSE_ALARM
from fsdpcheck.comparison.runs import Run, each_observed
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.execution import Failure
from fsdpcheck.simulation.simulate import Options

NOISY: Final = 4
"""Noisy runs of each world at first. More make the threshold lower (rounding_bound.py)."""
CONFIRMING: Final = 8
"""Further noisy runs of a world before it is said to differ."""
_EPS: Final = {"float64": 2.0**-52, "own": 2.0**-23}
Says = Literal["agrees", "differs", "fails", "undecidable"]
Told = Callable[[int, int, str], object]
"""(runs that have ended, runs in sight, what ended) -> None."""


@dataclass(frozen=True)
class World:
    """What came of one number of ranks against the base.

    ``fact``: the first that differs. ``first``: the first observable that differs. ``undecidable``: observables of
    which nothing can be said. ``precision``: the first that agrees in float64 and not in the script's own precision.
    ``causes``: sentences. ``resolution``: the coarsest of what agrees.
    """

    size: int
    says: Says
    failure: Failure | None = None
    fact: Fact | None = None
    first: Decision | None = None
    undecidable: tuple[Decision, ...] = ()
    precision: Decision | None = None
    causes: tuple[str, ...] = ()
    observables: int = 0
    equal: int = 0
    differing: int = 0
    alike: tuple[str, ...] = ()
    """Names of those that differ as ``first`` does: of its kind, at its step."""
    of_alike: int = 0
    """How many there are of its kind at its step."""
    resolution: float = 0.0
    line: str = ""
    call: str = ""


@dataclass(frozen=True)
class Comparison:
    """A script on several numbers of ranks.

    ``why``: why nothing could be compared; "" where it was. ``notes``: what is told and not judged, and how often.
    """

    line: CommandLine
    base: int
    worlds: tuple[World, ...]
    why: str = ""
    failure: Failure | None = None
    notes: tuple[tuple[str, int], ...] = ()
    steps: int = 0
    false_alarm: float = FALSE_ALARM
    runs: int = 0

    @property
    def says(self) -> Says:
        """The worst of what its worlds say; undecidable where nothing was compared."""
        said = {world.says for world in self.worlds}
        ranked: tuple[Says, ...] = ("fails", "differs", "undecidable", "agrees")
        return next((each for each in ranked if each in said), "undecidable")


@dataclass
class Runs:
    """Runs of one script as they are wanted, each once. ``jobs`` at a time; ``told`` hears of each that ends.

    ``base``: the number of ranks with which the others are compared.
    """

    line: CommandLine
    options: Options
    base: int = 1
    jobs: int = 1
    told: Told = lambda ended, goal, what: None
    done: dict[Run, Observation] = field(default_factory=dict)
    wholes: dict[Run, Assembled] = field(default_factory=dict)
    all: dict[Run, Values] = field(default_factory=dict)
    confirmed: bool = False
    """Whether a world that seemed to differ was run with more noise."""

    def get(self, wanted: Iterable[Run]) -> None:
        """Do those of the runs that are not done."""
        left = [run for run in dict.fromkeys(wanted) if run not in self.done]
        ended, goal = len(self.done), len(self.done) + len(left)
        for run, observation in each_observed(self.line.at, left, self.options, self.jobs):
            ended += 1
            self.done[run] = observation
            self.told(ended, goal, str(run))

    def whole(self, run: Run) -> Assembled:
        """What ranks have recorded, put together."""
        self.get([run])
        if run not in self.wholes:
            clean = replace(run, arithmetic=replace(run.arithmetic, noise=None))
            alone = None if run.world_size == self.base else self.whole(replace(clean, world_size=self.base))
            self.get([clean])
            self.wholes[run] = assembled(_begun_as(self.done[clean], self.done[run]), alone)
        return self.wholes[run]

    def values(self, run: Run) -> Values:
        """All observables of a run, losses put together among them."""
        if run not in self.all:
            whole = self.whole(run)
            self.all[run] = {**whole.values, **losses.together(whole)}
        return self.all[run]


def _begun_as(clean: Observation, noisy: Observation) -> Observation:
    """``noisy`` with what ranks of ``clean`` began with: by its first values it is known which part each rank has."""
    ranks = []
    for one, other in zip(clean.ranks, noisy.ranks, strict=True):
        first = {key: piece for key, piece in one.pieces.items() if key.kind == "initial parameter"}
        ranks.append(replace(other, pieces={**other.pieces, **first}))
    return replace(noisy, ranks=tuple(ranks))


def compare(
    line: CommandLine,
    ranks: Sequence[int],
    options: Options,
    *,
    jobs: int = 1,
    false_alarm: float = FALSE_ALARM,
    told: Told = lambda ended, goal, what: None,
    runs: Runs | None = None,
) -> Comparison:
    """Compare the script on each of ``ranks`` with itself on the first.

    Guarantee: an observable "agrees" where the two runs differ by no more than noise of rounding moves either, at a
    printed resolution no coarser than float32's; "differs" is said of an honest script with a probability of
    ``false_alarm`` at most, in the model of rounding_bound.py. Raises UsageError for ranks that are none, and for a
    command line that is none at one of them. ``runs``: where runs are kept, for a caller that looks at them.
    """
    _require(ranks)
    for size in ranks:
        line.at(size)
    runs, base = runs or Runs(line, options, ranks[0], jobs, told), ranks[0]
    clean, other = Run(base), Run(base, entropy=_OTHER)
    runs.get([clean])
    comparison = Comparison(line, base, (), false_alarm=false_alarm, steps=sum(_steps(runs.done[clean])))
    why, failure = _fails(runs, clean)
    if not why:
        runs.get([other, *(_raised(size) for size in ranks), *(Run(size) for size in ranks[1:])])
        why = _moves(runs, clean, other)
    if why:
        return replace(comparison, why=why, failure=failure, runs=len(runs.done), notes=_notes(runs))
    worlds = tuple(_world(runs, base, size, false_alarm / (len(ranks) - 1)) for size in ranks[1:])
    return replace(comparison, worlds=worlds, runs=len(runs.done), notes=_notes(runs))


_OTHER: Final = 1 << 20
"""Added to what stands for the system's random numbers, in a run that must come out equal all the same."""


def _require(ranks: Sequence[int]) -> None:
    if len(set(ranks)) < 2 or len(set(ranks)) < len(ranks) or min(ranks) < 1:
        raise UsageError(
            explain("--ranks names the numbers of ranks to compare", got=",".join(map(str, ranks)), wanted="1,2,4 say")
        )


def _raised(size: int, noise: int | None = None) -> Run:
    return Run(size, Arithmetic("float64", noise))


def _steps(observation: Observation) -> Sequence[int]:
    return next((record.steps for record in observation.ranks if record.steps), ())


def _fails(runs: Runs, clean: Run) -> tuple[str, Failure | None]:
    """Why the base is nothing to compare with, if it fails or makes no step."""
    failure = runs.done[clean].failure
    if failure is not None:
        return f"the script fails on {_ranks(clean)}", failure
    return ("", None) if any(_steps(runs.done[clean])) else (f"no optimizer made a step on {_ranks(clean)}", None)


def _moves(runs: Runs, clean: Run, other: Run) -> str:
    """The same if two runs of the base differ."""
    moved = [key for key, distance in between(runs.values(clean), runs.values(other)).items() if distance.apart]
    if not moved:
        return ""
    first = min(moved, key=order)
    return f"the script is not deterministic: run twice on {_ranks(clean)}, {first} is not the same"


def _ranks(run: Run) -> str:
    return "one rank" if run.world_size == 1 else f"{run.world_size} ranks"


def _world(runs: Runs, base: int, size: int, false_alarm: float) -> World:
    """What is said of one number of ranks: by exact facts in float64, by numbers there, by exact facts in its own."""
    own, raised = (Run(base), Run(size)), (_raised(base), _raised(size))
    if (failure := runs.done[own[1]].failure) is not None:
        return World(size, "fails", failure)
    unraised = next((runs.done[run].failure for run in raised if runs.done[run].failure is not None), None)
    if unraised is not None:
        why = f"in float64 it fails: {unraised.text.splitlines()[0]}"
        return _by_facts(runs, *own, false_alarm) or World(size, "undecidable", causes=(why,))
    first = facts.first(facts.differing(*(side for run in raised for side in (runs.done[run], runs.whole(run)))))
    fact = _by_facts(runs, *raised, false_alarm)
    if fact is not None and first is not None and first.kind not in facts.GIVEN:
        return fact
    world = _by_numbers(runs, base, size, false_alarm, first)
    if world.says != "agrees":
        return world
    return fact or _by_facts(runs, *own, false_alarm) or world


def _by_facts(runs: Runs, one: Run, this: Run, false_alarm: float) -> World | None:
    """What differs exactly and needs no numbers to confirm it, if anything does."""
    found = facts.differing(runs.done[one], runs.whole(one), runs.done[this], runs.whole(this))
    fact = facts.first(each for each in found if each.kind not in facts.GIVEN)
    if fact is None:
        return None
    told = list(_of_replicas(fact.key, runs, one, this, false_alarm)) if fact.kind == "replicas" else []
    if this.arithmetic.precision == "own":
        told.append("in float64 nothing differs")
    return World(this.world_size, "differs", fact=fact, causes=tuple(told), **_place(fact.key, runs.done[this]))


def _of_replicas(key: Key | None, runs: Runs, one: Run, this: Run, false_alarm: float) -> Sequence[str]:
    """What replicas that differ are together, as finely as noise lets one say."""
    if key is None or this.arithmetic.precision == "own":
        return ()
    noise = _noise(runs, one, this, NOISY)
    eps = _EPS[this.arithmetic.precision]
    found = decided(runs.values(one), runs.values(this), noise, eps, false_alarm, lambda other: other == key)
    return causes.of_replicas(key, runs.values(one), runs.done[this], found[0].threshold) if found else ()


def _by_numbers(runs: Runs, base: int, size: int, false_alarm: float, given: Fact | None = None) -> World:
    """``given``: the first difference in what ranks are given. It is told where numbers differ: rows may be split."""
    one, this = _raised(base), _raised(size)
    if all(distance.apart == 0 for distance in between(runs.values(one), runs.values(this)).values()):
        found = _decisions(runs, base, size, 0, false_alarm)
    else:
        found = _decisions(runs, base, size, NOISY, false_alarm)
        if any(decision.says == "differs" for decision in found) and not runs.confirmed:
            runs.confirmed = True
            found = _decisions(runs, base, size, NOISY + CONFIRMING, false_alarm)
    wrong = [decision for decision in found if decision.says == "differs"]
    undecidable = tuple(decision for decision in found if decision.says == "undecidable")
    agreeing = [decision for decision in found if decision.says == "agrees"]
    world = World(
        size,
        fact=given if wrong or undecidable else None,
        says="differs" if wrong else "undecidable" if undecidable else "agrees",
        undecidable=undecidable,
        observables=len(found),
        equal=sum(decision.apart == 0 for decision in found),
        differing=len(wrong),
        resolution=max((decision.resolution for decision in agreeing if decision.apart), default=0.0),
    )
    if not wrong:
        return replace(world, precision=_precision_only(runs, base, size, false_alarm, found))
    step = {decision.key: decision for decision in found if decision.key.step == wrong[0].key.step}
    evidence = causes.Evidence(runs.values(one), runs.values(this), runs.done[this], step)
    told = [*causes.causes(wrong[0], evidence), *_losses(runs, base, size, wrong[0].key.step, false_alarm)]
    alike = [decision for decision in step.values() if decision.key.kind == wrong[0].key.kind]
    names = tuple(decision.key.name for decision in alike if decision.says == "differs")
    return replace(
        world,
        first=wrong[0],
        alike=names,
        of_alike=len(alike),
        causes=tuple(told),
        **_place(wrong[0].key, runs.done[this]),
    )


def _losses(runs: Runs, base: int, size: int, step: int, false_alarm: float) -> Iterable[str]:
    """What the losses of a step say, as finely as noise lets them be told apart."""
    one, this = _raised(base), _raised(size)
    noise = _noise(runs, one, this, NOISY)
    found = decided(
        runs.values(one),
        runs.values(this),
        noise,
        _EPS["float64"],
        false_alarm,
        lambda key: key.kind.startswith("loss "),
    )
    agree = {decision.key for decision in found if decision.says != "differs"}
    return losses.told(step, runs.whole(one), runs.whole(this), agree.__contains__)


def _decisions(runs: Runs, base: int, size: int, many: int, false_alarm: float) -> list[Decision]:
    one, this = _raised(base), _raised(size)
    noise = _noise(runs, one, this, many)
    return decided(runs.values(one), runs.values(this), noise, _EPS["float64"], false_alarm, is_judged)


def _noise(runs: Runs, one: Run, this: Run, many: int) -> Noise:
    if not many:
        return Noise({}, 1)
    noisy = {
        run: [replace(run, arithmetic=replace(run.arithmetic, noise=seed)) for seed in range(many)]
        for run in (one, this)
    }
    runs.get(each for those in noisy.values() for each in those)
    return noise_of(*((runs.values(run), [runs.values(each) for each in those]) for run, those in noisy.items()))


def _precision_only(
    runs: Runs, base: int, size: int, false_alarm: float, raised: Sequence[Decision]
) -> Decision | None:
    """The first observable that differs in the script's own precision by more than its noise there.

    To first order noise grows as eps does: what lies within that multiple of the threshold in float64 needs no runs.
    """
    one, this = Run(base), Run(size)
    distances = between(runs.values(one), runs.values(this))
    within = {decision.key: decision.threshold * _EPS["own"] / _EPS["float64"] for decision in raised}
    if all(distance.apart <= within.get(key, 0.0) for key, distance in distances.items() if is_judged(key)):
        return None
    noise = _noise(runs, one, this, NOISY)
    found = decided(runs.values(one), runs.values(this), noise, _EPS["own"], false_alarm, is_judged)
    return next((decision for decision in found if decision.says == "differs"), None)


def is_judged(key: Key) -> bool:
    """Whether an observable is decided by its numbers. Options are exact; losses are each rank's own."""
    return not key.kind.startswith(("loss", "option "))


def _place(key: Key | None, run: Observation) -> dict[str, str]:
    """The script's line at which an observable was seen, and the collective before it."""
    for rank, record in enumerate(run.ranks):
        if key is not None and key in record.pieces:
            before = run.traces[rank][: record.calls.get(key, 0)]
            call = f"{before[-1]}, at {before[-1].where}" if before else ""
            return {"line": record.lines.get(key, ""), "call": call}
    return {}


def _notes(runs: Runs) -> tuple[tuple[str, int], ...]:
    """What the runs without noise tell, the most frequent first; how often in the one that has it most."""
    often: dict[str, int] = {}
    for run, observation in runs.done.items():
        if run.arithmetic.noise is None:
            for record in observation.ranks:
                for note, many in record.notes.items():
                    often[note] = max(often.get(note, 0), many)
    return tuple(sorted(often.items(), key=lambda item: (-item[1], item[0])))
