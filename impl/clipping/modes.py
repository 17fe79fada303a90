"""Mode: how a private step computes norms and clipped gradients. Every mode gives the same bits on exact data.

* norms: "ghost" takes the explicit form of each norm rule, "flash" a rule's kernel where it has one (``kernels``).
* passes: "two_pass" takes a second backward through the re-weighted losses (Li et al. 2021, arXiv:2110.05679);
  "bookkeeping" contracts the activations and backprops of the first backward with the clip factors, so that there is
  one backward only, at the price of keeping the backprops of all layers (Bu et al. 2022, arXiv:2210.00038).
* timing: "immediate" computes a layer's norm inside the backward, when its backprop arrives; "deferred" after it.

In mixed precision the two passes round apart: a re-weighted backprop in bfloat16 is not the weight times the backprop
whose norm was taken, so a clipped gradient may exceed C by roundings of bfloat16 (about 2**-8 of it). Bookkeeping
contracts the very backprops whose norms were taken, in float32, and stays within roundings of float32.

Two passes also take the backward to be linear: re-weighted losses must give re-weighted gradients. A tensor hook or an
autograd.Function that clamps or normalises gradients on their way breaks that, and the released sum may exceed C;
nothing in a step shows it. Take bookkeeping then: it weighs what was normed.

| mode        | backwards | parameters gathered       | kept until the factors are known      |
|-------------|-----------|---------------------------|---------------------------------------|
| two_pass    | 2         | forward, both backwards   | the autograd graph                    |
| bookkeeping | 1         | forward, backward         | activations and backprops of layers   |
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

ENVIRONMENT = "GRAD_SAMPLE_MODE"
"""Environment variable that overrides norms and passes of every step, for experiments."""


@dataclass(frozen=True)
class Mode:
    """See the file. The default needs the least memory and no kernel."""

    norms: Literal["ghost", "flash"] = "ghost"
    passes: Literal["two_pass", "bookkeeping"] = "two_pass"
    timing: Literal["immediate", "deferred"] = "immediate"


DEFAULT = Mode()


def parse(name: str, timing: Literal["immediate", "deferred"] = "immediate") -> Mode:
    """The mode of a usual name: "ghost", "flash", "ghost_bk", "flash_bk", each maybe with "fsdp" as in "ghost_fsdp_bk".

    Sharding is the model's own affair, so "fsdp" changes nothing. Raises ValueError for any other name.
    """
    first, *rest = name.split("_")
    if first in ("ghost", "flash") and set(rest) <= {"fsdp", "bk"} and len(rest) == len(set(rest)):
        norms: Literal["ghost", "flash"] = "ghost" if first == "ghost" else "flash"
        return Mode(norms, "bookkeeping" if "bk" in rest else "two_pass", timing)
    raise ValueError(
        f"got {name!r} as the mode of clipping, wanted ghost, flash, ghost_bk or flash_bk,"
        " each maybe with fsdp (ghost_fsdp, flash_fsdp_bk, ...)"
    )


def in_force(mode: Mode) -> Mode:
    """``mode``, with what the environment variable says instead of its norms and passes. Read at every step."""
    name = os.environ.get(ENVIRONMENT)
    if not name:
        return mode
    said = parse(name)
    return replace(mode, norms=said.norms, passes=said.passes)
