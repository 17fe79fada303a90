"""Each rank's own part of a gradient, as its backward gives it, before any reduction and before it is accumulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from fsdpcheck.comparison.observation.rank_log import RankLog
from fsdpcheck.compat.torch_private import is_dtensor


class GradientParts:
    """Hooks on the tensors that modules compute with. Those that are DTensors have no part that is a rank's own.

    A part is kept as "part n" of its parameter; n counts the backwards of a step.
    """

    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._hooked: dict[int, Tensor] = {}
        self._backwards: Counter[tuple[int, nn.Module, str]] = Counter()

    def after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """A module has returned, and still has the tensors that it computed with."""
        for name, tensor in {**vars(module), **module._parameters}.items():
            if not isinstance(tensor, Tensor) or not tensor.requires_grad or is_dtensor(tensor):
                continue
            if id(tensor) not in self._hooked:
                if tensor.is_leaf:
                    self._hooked[id(tensor)] = tensor
                cast(Any, tensor).register_hook(self._arrival(module, name))

    def _arrival(self, module: nn.Module, name: str) -> Callable[[Tensor], None]:
        def arrived(gradient: Tensor) -> None:
            if not is_dtensor(gradient):
                slot = self._log.step, module, name
                self._log.keep_part(self._backwards[slot], *slot, gradient)
                self._backwards[slot] += 1

        return arrived
