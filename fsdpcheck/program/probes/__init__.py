"""The probes that laws use: ``run(case, probes=(probes.padding,))``."""

from fsdpcheck.program.probes.buffers import non_persistent_buffers, persistent_buffers
from fsdpcheck.program.probes.hooks import (
    SLOPE,
    accumulations,
    footprint,
    gathered,
    hook_calls,
    interrupt_backward,
    interrupt_forward,
    interrupt_later,
    memory,
    set_up,
    start_apart,
    start_between,
)
from fsdpcheck.program.probes.observables import (
    Missing,
    local_tensors,
    loss_kept,
    ordered_norms,
    padding,
    poison_padding,
    scribbled,
    units,
)
from fsdpcheck.program.probes.step_data import quantities, quantities_but_local_gradients

__all__ = [
    "SLOPE",
    "Missing",
    "accumulations",
    "footprint",
    "gathered",
    "hook_calls",
    "interrupt_backward",
    "interrupt_forward",
    "interrupt_later",
    "local_tensors",
    "loss_kept",
    "memory",
    "non_persistent_buffers",
    "ordered_norms",
    "padding",
    "persistent_buffers",
    "poison_padding",
    "quantities",
    "quantities_but_local_gradients",
    "scribbled",
    "set_up",
    "start_apart",
    "start_between",
    "units",
]
