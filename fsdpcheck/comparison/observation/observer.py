"""The observer of a run: what each rank of an unmodified script does, seen without a call on any group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from fsdpcheck.comparison.observation.batches import Batches
from fsdpcheck.comparison.observation.checkpoints import Checkpoints
from fsdpcheck.comparison.observation.functions import Functions, scalars
from fsdpcheck.comparison.observation.gradient_parts import GradientParts
from fsdpcheck.comparison.observation.optimizer_steps import OptimizerSteps
from fsdpcheck.comparison.observation.pipeline_names import with_names_of_the_whole
from fsdpcheck.comparison.observation.rank_log import RankLog
from fsdpcheck.comparison.observation.unseen_updates import UnseenUpdates
from fsdpcheck.comparison.record import RankRecord, share_pieces
from fsdpcheck.compat import frames_private, layouts_private
from fsdpcheck.compat.torch_private import is_in_backward
from fsdpcheck.simulation.current_rank import current_rank, here


def collectives_so_far() -> int:
    """How many calls the rank that this thread is has issued in the simulation that runs; 0 outside."""
    run = getattr(here.home, "current", None)
    return 0 if run is None or here.number is None else len(run.traces[here.number])


class Observer:
    """Observes the ranks of one run. ``records``: by rank, complete when ``installed`` has closed.

    Guarantee: the run issues the same calls and computes the same bits as without it, and draws the same random
    numbers. What it cannot see is a note of the rank's.
    """

    def __init__(
        self,
        calls: Callable[[], int] = collectives_so_far,
        rank: Callable[[], int | None] = current_rank,
        *,
        parts: bool = False,
    ) -> None:
        """``rank``: which rank the calling thread is; ``calls``: how many collectives that has issued.

        ``parts``: whether each rank's own parts of gradients are kept as well.
        """
        self.records: dict[int, RankRecord] = {}
        self._calls, self._rank, self._parts = calls, rank, parts
        self._ranks: dict[int, _Rank] = {}
        self._functions = Functions(self._here)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While open, functions of torch tell the ranks that call them; to be opened once, around the run.

        When it closes, names of a pipeline's stages become those of the whole model.
        """
        try:
            with self._functions.in_place():
                yield
        finally:
            ranks = sorted(self.records)
            named = with_names_of_the_whole([self.records[rank] for rank in ranks])
            self.records.update(zip(ranks, named, strict=True))

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """While open, this thread's rank is observed; to be opened on its thread, around its script."""
        observed = _Rank(rank, RankLog(self._calls), self._functions)
        self._ranks[rank] = observed
        handles = observed.hooks(parts=self._parts)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            del self._ranks[rank]
            self.records[rank] = record = observed.end()
            for other in self.records.values():
                if other is not record:
                    share_pieces(record, other)

    def _here(self) -> _Rank | None:
        rank = self._rank()
        return None if rank is None else self._ranks.get(rank)


class _Rank:
    """What observes one rank. Nothing that goes wrong in it becomes an error of the script: it becomes a note."""

    def __init__(self, number: int, log: RankLog, functions: Functions) -> None:
        self._number, self.log, self._functions = number, log, functions
        self._optimizers, self._batches, self._checkpoints = OptimizerSteps(log), Batches(log), Checkpoints(log)
        self._updates = UnseenUpdates(log)
        self._in_norm = False

    def hooks(self, *, parts: bool) -> list[Any]:
        """Put hooks on all modules and optimizers; handles that take them off."""
        steps, batches = self._optimizers, self._batches
        batches.at_first_forward = self._updates.begin
        of_parts = self._guarded(GradientParts(self.log).after)
        return [
            *([modules.register_module_forward_hook(of_parts)] if parts else []),
            optimizers.register_optimizer_step_pre_hook(self._guarded(steps.before)),
            optimizers.register_optimizer_step_post_hook(self._guarded(steps.after)),
            modules.register_module_forward_pre_hook(self._guarded(batches.before)),
            modules.register_module_forward_hook(self._guarded(batches.after), always_call=True),
        ]

    def end(self) -> RankRecord:
        """The script has ended."""
        with self._noting():
            self._optimizers.end()
            self._updates.end(self._optimizers.covered)
        return self.log.record()

    def _guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def ours(*args: Any) -> Any:
            if torch.compiler.is_compiling():
                return None
            self._functions.look_for_more()
            with self._noting():
                return hook(*args)

        return ours

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """What goes wrong inside becomes a note, and no mode of the script's sees what is asked of tensors."""
        try:
            with layouts_private.without_function_modes():
                yield
        except Exception as error:
            self.log.note(f"something could not be observed, {type(error).__name__}: {error}")

    def made(self, optimizer: Optimizer) -> None:
        """An optimizer is about to be made."""
        self._optimizers.made(optimizer)

    def loss(self, tensors: object) -> None:
        """A backward is about to begin."""
        if is_in_backward():
            return
        with self._noting():
            losses, moment = scalars(tensors), self.log.now()
            for loss in losses:
                self.log.keep_numbered("loss", loss, moment)
            if not losses and frames_private.is_asked_by_a_program(sys._getframe(), Tensor.backward.__code__):
                self.log.note("a backward of tensors with several values is not compared as a loss")

    def labels(self, call: Callable[[], Any], target: object) -> Any:
        """A loss function is called."""
        outermost = False
        with self._noting():
            outermost = self._batches.in_loss(target)
        try:
            return call()
        finally:
            if outermost:
                self._batches.out_of_loss()

    def norm(self, call: Callable[[], Any]) -> Any:
        """A function that clips gradients, or computes their norm, is called."""
        if self._in_norm:
            return call()
        self._in_norm = True
        try:
            found = call()
        finally:
            self._in_norm = False
        with self._noting():
            if isinstance(found, Tensor):
                self.log.keep_numbered("norm", found, self.log.now())
        return found

    def save(self, call: Callable[[], Any], value: object, file: object) -> Any:
        """``torch.save`` is called; by torch itself it is where a distributed checkpoint is kept already."""
        if frames_private.is_asked_by_a_program(sys._getframe()):
            with self._noting():
                self._checkpoints.keep(value, file)
        return call()

    def save_distributed(self, call: Callable[[], Any], value: object, writer: object) -> Any:
        """``torch.distributed.checkpoint`` saves."""
        folder, name = getattr(writer, "checkpoint_id", None) or getattr(writer, "path", writer), ""
        with self._noting():
            name = self._checkpoints.keep(value, folder)
        found = call()
        if self._number == 0:  # it returns when all ranks have written
            with self._noting():
                self._checkpoints.read(name, folder)
        return found
