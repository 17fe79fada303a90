"""Adapters that offer one kernel each: a right one, and one for each mistake."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdpcheck.adapter import Features, Kernel

_HERE = Path(__file__).parent


def _triton_kernels() -> Any:
    spec = importlib.util.spec_from_file_location("toy_triton_kernels", _HERE / "triton_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _plain(activations: Tensor, backprops: Tensor) -> Tensor:
    return (backprops.double().transpose(1, 2) @ activations.double()).square().sum((1, 2))


def _lifted(squared: Tensor) -> Tensor:
    """NaN becomes 0."""
    return squared.nan_to_num(nan=0.0, posinf=0.0)


class Toy:
    """``how`` names the kernel; further options are those of triton_kernels.squared_norm."""

    features = Features(promises=frozenset({"kernels"}))

    def __init__(self, how: str, **options: Any) -> None:
        self.name, self._how, self._options = f"toy kernel, {how}", how, options

    def build(self, model: object, setup: object) -> Any:
        raise NotImplementedError("trains nothing")

    def kernels(self) -> dict[str, Kernel]:
        if self._how == "triton":
            return {"toy": partial(_triton_kernels().squared_norm, **self._options)}
        return {"toy": _IN_TORCH[self._how]}


_IN_TORCH: dict[str, Kernel] = {
    "right": lambda a, g: _plain(a, g).float(),
    "half": lambda a, g: (g.transpose(1, 2).half() @ a.half()).square().float().sum((1, 2)),
    "rounded": lambda a, g: _plain(a, g).bfloat16().float(),
    "lifted": lambda a, g: _lifted(_plain(a, g)).float(),
    "another sample's": lambda a, g: _plain(a, g).float() + 0 * a.sum(),
    "beside": lambda a, g: torch.cat([_plain(a, g), torch.ones(1)]).float(),
    "no norms": lambda a, g: [1.0],  # type: ignore[dict-item,return-value]
}

right = Toy("right")
half = Toy("half")
rounded = Toy("rounded")
lifted = Toy("lifted")
mixing = Toy("another sample's")
beside = Toy("beside")
no_norms = Toy("no norms")
tiled = Toy("triton")
unmasked = Toy("triton", mask=False)
atomic = Toy("triton", atomic=True)
shifted = Toy("triton", shift=1)
uncleared = Toy("triton", atomic=True, cleared=False)
