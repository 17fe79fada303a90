"""Implementations that raise what the harness raises, or classes of their own with those names: ``raising.py:NAME``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from refusing import Refusing, Replicas
from torch import nn

from fsdpcheck import errors
from fsdpcheck.adapters.contract import Batch, Setup


class Raises(Refusing):
    """Ranks raise in their step: ``error()``; the second time that a step is asked for it would go through."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        super().__init__("nothing")
        self.error = error

    def build(self, model: nn.Module, setup: Setup) -> Replicas:
        trainer = super().build(model, setup)
        step = trainer.step
        raised = []

        def raising(batch: Batch) -> None:
            if not raised:
                raised.append(self.error())
                raise raised[0]
            step(batch)

        trainer.step = raising  # type: ignore[method-assign]
        return trainer


class Unspeakable(errors.AdapterError):
    """One of ours that cannot be told."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Late(Refusing):
    """Its features raise once they have been read."""

    def __init__(self) -> None:
        super().__init__("nothing")
        self.read = 0

    @property
    def features(self):  # type: ignore[no-untyped-def, override]
        self.read += 1
        if self.read > 30:
            raise errors.NotExact("late")
        return replace(Refusing.features)


NAMES = ("NotSupported", "AdapterError", "NotExact", "Refused", "NoProgress", "Interrupted", "UsageError")
_namesakes = {name: type(name, (Exception,), {}) for name in NAMES}
_ours = {name: getattr(errors, name) for name in NAMES}
for _owner, _kinds in (("own", _namesakes), ("our", _ours)):
    for _name, _kind in _kinds.items():
        globals()[f"{_owner}_{_name}"] = Raises(lambda kind=_kind: kind("said by the user"))  # type: ignore[misc]
unspeakable, late = Raises(Unspeakable), Late()
