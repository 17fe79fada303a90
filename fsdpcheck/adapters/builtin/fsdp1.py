"""PyTorch FSDP1: how it is kept clear of its known defects, and variants of which each meets one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from fsdpcheck.adapters.builtin import _fsdp1
from fsdpcheck.adapters.contract import Promise, Setup, Trait
from fsdpcheck.adapters.training_loop import PLAIN_REASONS
from fsdpcheck.case import MeshSpec

Defect = Literal["", "hybrid of one", "no_sync in bfloat16", "tied apart", "passed on", "thawed on one shard"]
"""What is kept clear of, each; "": no such one."""
_REASONS: Final[Mapping[str, str]] = {
    **{promise: reason for promise, reason in PLAIN_REASONS.items() if promise != "copies"},
    "padding.zero": "fills its padding with 42 on purpose (_FLAT_PARAM_PADDING_VALUE), so that a leak is seen",
    "padding.unread": "has no public view of its padding",
    "epochs": "has torch's DistributedSampler, which is checked with fully_shard",
    "lifecycle": "gathers the next unit ahead, and has no public view of what is gathered",
    "hooks": "gives frozen modules beside trained ones a backward: hooks fire; fsdp1:hooked promises it",
    "parameter-hooks": "sets gradients of the views that the optimizer has by itself",
    "interrupts": "has no way back from a forward or backward that raised",
    "features": "the features are those of FSDP2",
    "features.broadcast": "its sync_module_states=True refuses parameters on the CPU, where this runs (2.13)",
}


class _Loop(_fsdp1.Loop):
    """``meets``: of what it is not kept clear."""

    def __init__(self, model: FullyShardedDataParallel, setup: Setup, meets: Defect) -> None:
        super().__init__(model, setup)
        self._meets = meets

    def thaw(self) -> None:
        """Refused where it would go wrong: on one shard, the first gradients of what is thawed are lost by no_sync."""
        step, one = self.setup.step, self.setup.mesh.dp_shard == 1
        if one and step.micro_batches > 1 and not step.sync_every and self._meets != "thawed on one shard":
            raise NotImplementedError("on one shard FSDP1 loses gradients of what is thawed that no_sync leaves")
        super().thaw()

    def reducing(self, number: int, last: int) -> AbstractContextManager[object]:
        every = self.setup.compute_dtype is not None and self._meets != "no_sync in bfloat16"
        return nullcontext() if every else super().reducing(number, last)

    def gradients(self) -> dict[str, Tensor | None]:
        with _default_dtype(next(self.model.parameters()).dtype):
            return super().gradients()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Around a gather of gradients: a rank whose shard has none sends ``torch.zeros`` of the *default* dtype.

    That is FlatParamHandle.unshard_grad in torch 2.13; other ranks send the parameters' dtype, and in a float64 model
    the all-gather is torn. A unit that mixes frozen and trainable parameters has such ranks.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _refuse_tied_apart(model: nn.Module, setup: Setup) -> None:
    """Raise ValueError for a parameter of two units, or of a unit and the root."""
    unit_of = {f"{name}.": number for number, names in enumerate(setup.units) for name in names}
    seen: dict[int, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = next((number for prefix, number in unit_of.items() if name.startswith(prefix)), -1)
        if seen.setdefault(id(parameter), own) != own:
            raise ValueError(f"{name} is in two units: on one shard FSDP1 loses the gradient of one, in silence")


def _give_another_tensor(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook: a unit that left its layers out gives a view of its input, for FSDP1 puts hooks on both."""
    return output.view_as(output) if output is inputs[0] else None


class FullyShardedDataParallelAdapter(_fsdp1.Fsdp1):
    """Kept clear of all known defects but the one that it ``meets``. Tied layers must be in one unit (see fsdp.wrap).

    ``promises`` and ``accepts``: one more of each.
    """

    def __init__(
        self, name: str, meets: Defect = "", promises: Promise | None = None, accepts: Trait | None = None
    ) -> None:
        self.name, self._meets, self.loop = name, meets, partial(_Loop, meets=meets)
        self.features = replace(
            _fsdp1.Fsdp1.features,
            promises=_fsdp1.PROMISES | ({promises} if promises else set()),
            accepts=_fsdp1.Fsdp1.features.accepts | ({accepts} if accepts else set()),
            reasons={promise: reason for promise, reason in _REASONS.items() if promise != promises},
        )

    def strategy(self, mesh: MeshSpec) -> ShardingStrategy:
        """Replicas that do not shard are NO_SHARD over all ranks."""
        alone = mesh.dp_replicate > 1 and mesh.dp_shard == 1
        return ShardingStrategy.NO_SHARD if alone and self._meets != "hybrid of one" else super().strategy(mesh)

    def build(self, model: nn.Module, setup: Setup) -> _fsdp1.Loop:
        if self._meets != "tied apart":
            _refuse_tied_apart(model, setup)
        units = {id(unit): unit for names in setup.units for unit in map(model.get_submodule, names)}
        for unit in units.values() if self._meets != "passed on" else ():
            if not any(parameter.requires_grad for parameter in unit.parameters()):
                unit.register_forward_hook(_give_another_tensor)
        return super().build(model, setup)


adapter = FullyShardedDataParallelAdapter("fsdp1")
hybrid_of_one = FullyShardedDataParallelAdapter("fsdp1, HYBRID_SHARD of one", "hybrid of one")
"""A known finding: with one shard a replica a hybrid strategy becomes NO_SHARD *inside* the replica and never reduces
over replicas (_init_core_state and _reduce_grad_no_shard in torch 2.13; pytorch#154888)."""
hooked = FullyShardedDataParallelAdapter("fsdp1, with hooks", promises="hooks")
"""A known finding: a frozen parameter in one unit with trained ones is a view of the one flat parameter, so its module
has a backward, and the user's backward hooks on it fire where a single device has none to fire."""
thawing = FullyShardedDataParallelAdapter("fsdp1, thawed on one shard", "thawed on one shard")
"""A known finding: on one shard the first step behind a thaw loses the gradients of micro-batches under ``no_sync``, if
those before were under it too (torch 2.13). ``adapter`` refuses it."""
inferring = FullyShardedDataParallelAdapter("fsdp1, in inference mode", accepts="inference-mode")
"""A known finding: what a forward in ``torch.inference_mode`` gathers into is an inference tensor, and the next step of
training raises, unless ``summon_full_params`` was between (torch 2.13; pytorch#113203)."""
passed_on = FullyShardedDataParallelAdapter("fsdp1, frozen units that pass on their input", "passed on")
"""A known finding: a unit in which nothing is trained and that gives its input as it is, as where no sample of a
micro-batch needs its layers, raises in the backward (torch 2.13). Its hooks of before and behind are on one tensor."""
tied_apart = FullyShardedDataParallelAdapter("fsdp1, weights of two units", "tied apart")
"""A known finding: on one shard a weight that two units share loses the gradient of one of them, torch 2.13; on several
the forward raises. ``adapter`` refuses it."""
unsynced = FullyShardedDataParallelAdapter("fsdp1, no_sync in mixed precision", "no_sync in bfloat16")
"""Two known findings of ``no_sync`` in mixed precision, torch 2.13. Micro-batches are added up in bfloat16, which
fully_shard does in ``reduce_dtype``. With one shard it raises RuntimeError where parameters are tied: the gradient it
left in bfloat16 is given to the second name without the detour that the first takes
(FlatParamHandle._use_sharded_grad_views). ``adapter`` reduces after every micro-batch in mixed precision."""
