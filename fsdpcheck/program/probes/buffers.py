"""Probes that give a rank's model buffers of which no two ranks build equal ones, and note those that it computes with.

The model as a whole and each inner unit of a drawn model have such a buffer, and multiply what they give by half of it:
rank 0's is 2, so that the model is the case's, bit for bit, and on each other rank another power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fsdpcheck.program.probe import Notes, probe


@probe()
def persistent_buffers(model: nn.Module, notes: Notes) -> None:
    """Buffers that a state dict has. Notes by name those that are built, then each at the first forward behind it."""
    _give(model, "saved_gain", True, notes)


@probe()
def non_persistent_buffers(model: nn.Module, notes: Notes) -> None:
    """As ``persistent_buffers``, with ``persistent=False``: no state dict has them."""
    _give(model, "unsaved_gain", False, notes)


def _give(model: nn.Module, name: str, persistent: bool, notes: Notes) -> None:
    first = next(model.parameters())
    held = getattr(model, "units", None)  # a user's own model has none
    units = [*held.named_children()] if isinstance(held, nn.ModuleList) else []
    for path, module in [("", model), *((f"units.{number}.", unit) for number, unit in units)]:
        built = first.detach().new_full((1,), 2.0 ** (notes.rank + 1))
        module.register_buffer(name, built, persistent=persistent)
        module.register_forward_hook(_gain(name, path + name, notes))
    notes.add({key: value.to("cpu", copy=True) for key, value in model.named_buffers() if key.endswith(name)})


def _gain(name: str, path: str, notes: Notes) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook: a module's output is multiplied by half of its buffer ``name``, noted once under ``path``."""
    noted = False

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        nonlocal noted
        gain = module.get_buffer(name).detach()
        if not noted:
            noted = True
            notes.add({path: gain.to("cpu", copy=True)})
        if isinstance(output, tuple):  # of a unit with an instrument of its own
            return (_times(output[0], gain), *output[1:])
        return _times(output, gain)

    return hook


def _times(values: Tensor, gain: Tensor) -> Tensor:
    """In the values' own dtype."""
    return values * (gain / 2).to(values.dtype)
