"""Watch: what is called beside a program to look at it, and where what it sees is kept.

Observers look at the trainer, at named moments; watchers hang hooks into the model, before it is sharded.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from fsdpcheck.compat import torch_private
from fsdpcheck.errors import Interrupted
from fsdpcheck.execution import RankResult, RunRequest

Observer = Callable[..., Any]
GRAPHS = "graphs"
"""Under which the number of operators in each compiled graph is noted."""


@dataclass
class Notes:
    """Where a watcher writes what it sees in a rank: plain data, kept with the step in which it was seen (from -1).

    ``on_moment(function)``: have function(moment) called at every moment, as observers are.
    ``on_parameters(function)``: have function(parameters) called with those that an optimizer is made for, live.
    """

    rank: int
    add: Callable[[Any], None]
    step: Callable[[], int]
    on_moment: Callable[[Callable[[str], None]], None]
    on_parameters: Callable[[Callable[[list[nn.Parameter]], None]], None]
    interrupt: Callable[[], None] = lambda: None
    """Raises Interrupted: the step is then taken again. Does nothing where no step is taken."""


class Watch:
    """Calls the run's observers at each moment and stores what they return, and what its watchers note."""

    step: int
    """The step that is being taken, from 0; -1 before the first."""
    has_interrupted: bool
    """Whether a watcher has interrupted the step."""

    def __init__(self, request: RunRequest, rank: int, result: RankResult) -> None:
        self.observers = [(name, _resolve(name)) for name in request.observers]
        self.watchers = [(name, _resolve(name)) for name in request.watchers]
        self.rank, self.result, self.step, self.has_interrupted = rank, result, -1, False
        self._compiled = False
        self._told: list[Callable[[str], None]] = []
        self._shown: list[Callable[[list[nn.Parameter]], None]] = []

    def note(self, name: str, value: object) -> None:
        """Keep what a watcher of this name saw."""
        self.result.observations.append((name, "noted", self.step, value))

    def model(self, model: nn.Module) -> None:
        """Let the watchers hang their hooks into the rank's model."""
        for name, function in self.watchers:
            function(model, self._notes(name))

    def _notes(self, name: str) -> Notes:
        add = functools.partial(self.note, name)
        return Notes(self.rank, add, lambda: self.step, self._told.append, self._shown.append, self._interrupt)

    def _interrupt(self) -> None:
        self.has_interrupted = True
        raise Interrupted("interrupted on purpose")

    def moment(self, name: str, trainer: object) -> None:
        """Let the observers look at the trainer, and tell the watchers who asked for it."""
        for observer, function in self.observers:
            value = function(name, trainer, self.rank)
            if value is not None:
                self.result.observations.append((observer, name, self.step, value))
        for told in self._told:
            told(name)

    def parameters(self, parameters: list[nn.Parameter]) -> None:
        """Show the watchers who asked for it what an optimizer is made for."""
        for shown in self._shown:
            shown(parameters)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` through torch.compile: traced into graphs, which are noted and run as they are."""

        def backend(graph: Any, inputs: Any) -> Any:
            self.note(GRAPHS, len(graph.graph.nodes))
            return graph.forward

        if not self._compiled:
            self._compiled = True
            torch_private.forget_graphs()
        return torch.compile(function, backend=backend)


def _resolve(dotted: str) -> Observer:
    module, _, attribute = dotted.partition(":")
    return cast(Observer, getattr(importlib.import_module(module), attribute))
