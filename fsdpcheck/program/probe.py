"""A probe looks at a run from inside each rank: what it is, what it is handed, and who calls it.

A request names probes by dotted names, for it is plain data; a law hands ``run`` the probes themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from fsdpcheck.compat import torch_private
from fsdpcheck.errors import AdapterError, Interrupted, explain
from fsdpcheck.execution import RankResult, RunRequest
from fsdpcheck.loading import references
from fsdpcheck.program.releases import Releases

GRAPHS = "graphs"
"""Under which the number of operators in each compiled graph is noted."""

BUILD: Final = "before_build"
"""When the rank has built its model, and the adapter has not seen it."""

_KIND: Final = references.Kind("probe", AdapterError)


@dataclass
class Notes:
    """What a probe is handed beside what it looks at: where it is, and where it writes plain data that it sees.

    ``add(value)``: keep it, with the step in which it was seen (from -1). ``moment``: the one the run is at.
    ``on_moment(function)``: have function(moment) called at every moment after ``BUILD``.
    ``on_optimizer(function)``: have function(optimizer) called with each one that is made, live.
    ``on_loss(function)``: have function(loss) called with the module that gives per-sample losses.
    ``in_step()``: whether a step is being taken.
    """

    rank: int
    add: Callable[[Any], None]
    step: Callable[[], int]
    on_moment: Callable[[Callable[[str], None]], None]
    on_optimizer: Callable[[Callable[[torch.optim.Optimizer], None]], None]
    interrupt: Callable[[], None] = lambda: None
    """Raises Interrupted: the step is then taken again. Does nothing where no step is taken."""
    moment: Callable[[], str] = lambda: BUILD
    on_loss: Callable[[Callable[[nn.Module], object]], None] = lambda function: None
    in_step: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Probe:
    """function(model, notes) at ``BUILD``, to hang hooks into the model, or function(trainer, notes) at later moments.

    It returns plain data to be kept with moment and step, or None for nothing. ``at``: the moments; None: each that is
    announced. ``calls``: the method of trainers that it needs, "" if none.
    """

    function: Callable[[Any, Notes], Any]
    at: tuple[str, ...] | None
    calls: str

    @property
    def name(self) -> str:
        """The dotted name under which a request has it, and a result what it saw."""
        return f"{self.function.__module__}:{self.function.__qualname__}"

    def __call__(self, seen: Any, notes: Notes) -> Any:
        return self.function(seen, notes)

    def looks_at(self, moment: str) -> bool:
        return moment != BUILD if self.at is None else moment in self.at

    def saw(self, result: RankResult) -> list[tuple[str, int, Any]]:
        """(moment, step, value) of all that it returned in a rank; the moment of what it noted is "noted"."""
        return [(moment, step, value) for name, moment, step, value in result.observations if name == self.name]

    def was_in(self, request: RunRequest) -> bool:
        return self.name in request.probes


def probe(at: Sequence[str] | None = (BUILD,), calls: str = "") -> Callable[[Callable[[Any, Notes], Any]], Probe]:
    """Make a Probe of a function; see there."""
    return lambda function: Probe(function, at if at is None else tuple(at), calls)


def names_of(probes: Iterable[Probe | str]) -> tuple[str, ...]:
    """Dotted names of probes."""
    return tuple(one.name if isinstance(one, Probe) else one for one in probes)


def load(name: str) -> Probe:
    """The probe of a dotted name. Raises AdapterError for what cannot be imported, and for what is no probe."""
    found = references.load(name, _KIND)
    if not isinstance(found, Probe):
        wanted = "a function below @fsdpcheck.laws.probe(...)"
        then = "say at which moments it looks, and which method of trainers it calls"
        raise AdapterError(explain(f"{name!r} is no probe", got=type(found).__name__, wanted=wanted, then=then))
    return found


class Watch:
    """Calls the run's probes at their moments and stores what they return and note."""

    step: int
    """The step that is being taken, from 0; -1 before the first."""
    has_interrupted: bool
    """Whether a probe has interrupted the step."""
    in_step: bool
    """Whether a step is being taken."""

    def __init__(self, request: RunRequest, rank: int, result: RankResult) -> None:
        self.rank, self.result, self.step, self.has_interrupted = rank, result, -1, False
        self.in_step = False
        self._moment, self._compiled = BUILD, False
        self._told: list[Callable[[str], None]] = []
        self._optimizers: list[Callable[[torch.optim.Optimizer], None]] = []
        self._losses: list[Callable[[nn.Module], object]] = []
        self._releases: Releases | None = None
        if request.releases is not None:
            forced = request.releases[rank] if request.releases else ()
            self._releases = Releases(result, lambda: self.step, forced)
            self._optimizers.append(self._releases.see)
        self._probes = [(name, load(name), self._notes(name)) for name in request.probes]

    def note(self, name: str, value: object) -> None:
        """Keep what a probe of this name noted."""
        self.result.observations.append((name, "noted", self.step, value))

    def _notes(self, name: str) -> Notes:
        add = functools.partial(self.note, name)
        return Notes(
            self.rank,
            add,
            lambda: self.step,
            self._told.append,
            self._optimizers.append,
            self._interrupt,
            lambda: self._moment,
            self._losses.append,
            lambda: self.in_step,
        )

    def _interrupt(self) -> None:
        self.has_interrupted = True
        raise Interrupted("interrupted on purpose")

    def model(self, model: nn.Module) -> None:
        """Let the probes of ``BUILD`` hang their hooks into the rank's model."""
        self._look(BUILD, model)

    def moment(self, name: str, trainer: object) -> None:
        """Let the probes of this moment look at the trainer, and tell those that asked for every moment."""
        self._look(name, trainer)
        for told in self._told:
            told(name)

    def _look(self, moment: str, seen: object) -> None:
        self._moment = moment
        for name, one, notes in self._probes:
            value = one(seen, notes) if one.looks_at(moment) else None
            if value is not None:
                self.result.observations.append((name, moment, self.step, value))

    def begin_step(self) -> None:
        """A step is taken from here on."""
        self.in_step = True
        if self._releases is not None:
            self._releases.come_last()

    def optimizer(self, made: torch.optim.Optimizer) -> None:
        """Show an optimizer to the probes that asked for it."""
        for shown in self._optimizers:
            shown(made)

    def loss(self, loss: nn.Module) -> None:
        """Show the loss to the probes that asked for it."""
        for shown in self._losses:
            shown(loss)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` through torch.compile: traced into graphs, which are noted and run as they are."""

        def backend(graph: Any, inputs: Any) -> Any:
            self.note(GRAPHS, len(graph.graph.nodes))
            return graph.forward

        if not self._compiled:
            self._compiled = True
            torch_private.forget_graphs()
        return torch.compile(function, backend=backend)
