"""Which form of the squared norm suits a shape: the same answer on every rank.

The answer depends on T, d, p, dtype and device, never on the number of samples, which differs from rank to rank, nor on
a clock. Unless a measurement says otherwise, ``rule`` decides:

* T = 1: half-Gram, which is |a|^2 |g|^2; nothing can cancel.
* half-Gram where T <= d p / (2 (d + p)), a quarter of the direct form's operations; the margin is for its error, which
  grows with the square of the condition number.
* otherwise direct.

What the margin does not cover: on tokens that cancel to a thousandth (condition number 1000), half-Gram norms^2 were up
to 12 % off, often too small, where direct ones were off by 2e-6 (``python -m benchmarks accuracy``). A norm that comes
out too small is clipped too little; where tokens may cancel so far, call the direct form.

Measurements are a table that its owner makes (``measure``) and publishes to every rank (``install``) before training.
No rank ever measures on its own: two ranks that choose differently would give one sample two norms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Form = Literal["direct", "half_gram", "bmm"]


class Shape(NamedTuple):
    """What a measured choice is made for. ``device`` is ``device_name``'s; ``dtype`` is written like "bfloat16"."""

    T: int
    d: int
    p: int
    dtype: str
    device: str


_measured: dict[Shape, Form] = {}


def form(T: int, d: int, p: int, dtype: torch.dtype, device: torch.device) -> Form:
    """The form to use: the installed measurement of exactly this shape, or else ``rule``."""
    if not _measured:
        return rule(T, d, p)
    return _measured.get(Shape(T, d, p, _name(dtype), device_name(device)), rule(T, d, p))


def rule(T: int, d: int, p: int) -> Form:
    """The form by counting operations, with a margin for the Gram form's error."""
    return "half_gram" if T == 1 or 2 * T * (d + p) <= d * p else "direct"


def install(table: Mapping[Shape, Form]) -> None:
    """Replace all measured choices. Every rank has to install an equal table. Raises ValueError for unknown forms."""
    unknown = {shape: name for shape, name in table.items() if name not in get_args(Form)}
    if unknown:
        raise ValueError(f"got {unknown}, wanted one of {get_args(Form)} for each shape")
    _measured.clear()
    _measured.update(table)


def measure(
    a_BTd: Tensor, g_BTp: Tensor, forms: Mapping[Form, Callable[[Tensor, Tensor], Tensor]], repeats: int = 15
) -> dict[Shape, Form]:
    """{shape: the fastest of ``forms``} on these tensors, by the least of ``repeats`` times after one warm-up.

    For one rank to call; send what it returns to all others and ``install`` it there.
    """
    seconds: dict[Form, float] = {name: min(_times(run, a_BTd, g_BTp, repeats)) for name, run in forms.items()}
    fastest = min(seconds, key=lambda name: seconds[name])
    _, T, d = a_BTd.shape
    return {Shape(T, d, g_BTp.shape[2], _name(a_BTd.dtype), device_name(a_BTd.device)): fastest}


def device_name(device: torch.device) -> str:
    """ "cpu", or the model of the accelerator, such as "NVIDIA H100 80GB HBM3": equal on ranks with equal devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _times(run: Callable[[Tensor, Tensor], Tensor], a_BTd: Tensor, g_BTp: Tensor, repeats: int) -> list[float]:
    run(a_BTd, g_BTp)
    times = []
    for _ in range(repeats):
        _wait(a_BTd.device)
        started = time.perf_counter()
        run(a_BTd, g_BTp)
        _wait(a_BTd.device)
        times.append(time.perf_counter() - started)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
