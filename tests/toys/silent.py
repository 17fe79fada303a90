"""The reference that does not announce every moment: ``silent.py:after_reduce`` leaves that one out, in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast, get_args

from torch import nn

from fsdpcheck.adapters.builtin.reference import Reference, ReferenceTrainer
from fsdpcheck.adapters.contract import Moment, Setup, Shard

Left = Callable[[str, int, int], bool]
"""Whether a moment is left out, of its name, the step and the rank."""


class Silent(Reference):
    """Announces what ``left`` does not leave out."""

    def __init__(self, left: Left) -> None:
        super().__init__()
        self.left = left

    def build(self, model: nn.Module, setup: Setup) -> ReferenceTrainer:
        def notify(moment: str, trainer: object) -> None:
            if not self.left(moment, cast(ReferenceTrainer, trainer).impl.steps_taken, setup.rank):
                setup.notify(moment, trainer)

        return super().build(model, replace(setup, notify=notify))


class OncePerStep(Reference):
    """Announces each moment for the first micro-batch of a step alone."""

    def build(self, model: nn.Module, setup: Setup) -> ReferenceTrainer:
        told: set[tuple[str, int]] = set()

        def notify(moment: str, trainer: object) -> None:
            now = moment, cast(ReferenceTrainer, trainer).impl.steps_taken
            if now not in told:
                told.add(now)
                setup.notify(moment, trainer)

        return super().build(model, replace(setup, notify=notify))


class WithoutGradients(Reference):
    """Announces every moment, and shows shards of parameters alone."""

    def build(self, model: nn.Module, setup: Setup) -> ReferenceTrainer:
        trainer = super().build(model, setup)
        shown = trainer.shards
        trainer.shards = lambda: [shard for shard in shown() if shard.holds != "gradient"]  # type: ignore[method-assign]
        return trainer


class WithoutOneGradient(Reference):
    """Shows no gradient of its last shard where gradients are reduced: by ``with_none``, None in its place."""

    with_none = False

    def build(self, model: nn.Module, setup: Setup) -> ReferenceTrainer:
        trainer = super().build(model, setup)
        shown = trainer.shards

        def shards() -> list[Shard]:
            *others, last = shown()
            if last.holds != "gradient":
                return [*others, last]
            return [*others, replace(last, data=None)] if self.with_none else others  # type: ignore[arg-type]

        trainer.shards = shards  # type: ignore[method-assign]
        return trainer


class WithNone(WithoutOneGradient):
    with_none = True


nothing = Silent(lambda moment, step, rank: True)
in_the_last_step = Silent(lambda moment, step, rank: moment == "before_step" and step == 1)
on_one_rank = Silent(lambda moment, step, rank: moment == "before_step" and rank == 1)
globals().update({name: Silent(lambda moment, step, rank, name=name: moment == name) for name in get_args(Moment)})  # type: ignore[misc]
