"""Runs of one script, each made once and when it is wanted, with what their ranks have recorded put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from fsdpcheck.comparison import losses
from fsdpcheck.comparison.command_line import CommandLine
from fsdpcheck.comparison.decision import Noise, Values, noise_of
from fsdpcheck.comparison.observation.whole import Assembled, assembled
from fsdpcheck.comparison.record import Key, Observation
from fsdpcheck.comparison.runs import NOTHING_SAID, Draws, Run, each_observed
from fsdpcheck.simulation.simulate import Options

Told = Callable[[int, int, str], object]
"""(runs that have ended, runs in sight, what ended) -> None."""


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
    draws: Draws = NOTHING_SAID
    done: dict[Run, Observation] = field(default_factory=dict)
    confirmed: bool = False
    """Whether a world that seemed to differ was run with more noise."""
    _wholes: dict[Run, Assembled] = field(default_factory=dict)
    _values: dict[Run, Values] = field(default_factory=dict)

    def get(self, wanted: Iterable[Run]) -> None:
        """Do those of the runs that are not done."""
        left = [run for run in dict.fromkeys(wanted) if run not in self.done]
        ended, goal = len(self.done), len(self.done) + len(left)
        for run, observation in each_observed(self.line, left, self.options, self.jobs, self.draws):
            ended += 1
            self.done[run] = observation
            self.told(ended, goal, str(run))

    def whole(self, run: Run) -> Assembled:
        """What ranks have recorded, put together."""
        self.get([run])
        if run not in self._wholes:
            clean = replace(run, arithmetic=replace(run.arithmetic, noise=None))
            alone = None if run.world_size == self.base else self.whole(replace(clean, world_size=self.base))
            self.get([clean])
            self._wholes[run] = assembled(_begun_as(self.done[clean], self.done[run]), alone)
        return self._wholes[run]

    def values(self, run: Run) -> Values:
        """All observables of a run, losses put together among them."""
        if run not in self._values:
            whole = self.whole(run)
            self._values[run] = {**whole.values, **losses.together(whole)}
        return self._values[run]

    def noise(self, pair: tuple[Run, Run], many: int) -> Noise:
        """How far ``many`` noisy runs of each of the two lie from it; none where ``many`` is 0."""
        if not many:
            return Noise({}, 1)
        noisy = {run: with_noise(run, many) for run in pair}
        self.get(each for those in noisy.values() for each in those)
        return noise_of(*((self.values(run), [self.values(each) for each in those]) for run, those in noisy.items()))

    def exact_in(self, pair: tuple[Run, Run]) -> frozenset[Key]:
        """What was proved exact in both, on all ranks that have a part of it."""
        ranks = [record for run in pair for record in self.done[run].ranks]
        found = frozenset(key for record in ranks for key in record.exact)
        return found - {key for record in ranks for key in record.pieces if key not in record.exact}

    def notes(self) -> tuple[tuple[str, int], ...]:
        """What the runs without noise tell, the most frequent first; how often in the one that has it most."""
        often: dict[str, int] = {}
        for run, observation in self.done.items():
            if run.arithmetic.noise is None:
                for record in observation.ranks:
                    for note, many in record.notes.items():
                        often[note] = max(often.get(note, 0), many)
        return tuple(sorted(often.items(), key=lambda item: (-item[1], item[0])))


def with_noise(run: Run, many: int) -> list[Run]:
    """The same with noise, that often."""
    return [replace(run, arithmetic=replace(run.arithmetic, noise=seed)) for seed in range(many)]


def _begun_as(clean: Observation, noisy: Observation) -> Observation:
    """``noisy`` with what ranks of ``clean`` began with: by its first values it is known which part each rank has."""
    ranks = []
    for one, other in zip(clean.ranks, noisy.ranks, strict=True):
        first = {key: piece for key, piece in one.pieces.items() if key.kind == "initial parameter"}
        ranks.append(replace(other, pieces={**other.pieces, **first}))
    return replace(noisy, ranks=tuple(ranks))
