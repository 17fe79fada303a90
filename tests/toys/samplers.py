"""Adapters whose samplers break the protocol, or hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fsdpcheck.adapter import Drawn, Features, SamplerSetup
from fsdpcheck.adapters.builtin import _torch_sampler


class Toy:
    features = Features(promises=frozenset({"epochs"}))

    def __init__(self, how: str) -> None:
        self.name, self._how = f"toy sampler, {how}", how

    def build(self, model: object, setup: object) -> Any:
        raise NotImplementedError("trains nothing")

    def sampler(self, setup: SamplerSetup) -> Any:
        return _Sampler(self._how, setup)


class _Sampler:
    def __init__(self, how: str, setup: SamplerSetup) -> None:
        self._how, self._setup = how, setup

    def steps(self, epoch: int, start: int = 0) -> Iterator[Any]:
        if self._how == "tensors":
            yield Drawn(((torch.tensor(0),),))  # type: ignore[arg-type]
        elif self._how == "out of range":
            yield Drawn(((1 << 30,),))
        elif self._how == "bare lists":
            yield [0]
        else:
            yield from _torch_sampler.Shares(self._setup).steps(epoch, start)
            if self._setup.rank == 0 and self._setup.world_size > 1:
                dist.all_reduce(torch.zeros(1))


tensors = Toy("tensors")
out_of_range = Toy("out of range")
bare_lists = Toy("bare lists")
lonely = Toy("lonely")
