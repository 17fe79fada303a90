"""PyTorch FSDP1 as one writes it: each unit is one flat parameter; HYBRID_SHARD with replicas.

What it is kept clear of, and what is promised of it and why not, is in fsdp1.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdpcheck.adapters.contract import ArithmeticRule, Features, GlobalNormRule, Promise, Setup
from fsdpcheck.adapters.training_loop import ORDINARY, TrainingLoop, mesh_of
from fsdpcheck.case import MeshSpec

PROMISES: frozenset[Promise] = frozenset({"plain", "global-norm", "sharded", "memory", "copies", "thawing"})


class Loop(TrainingLoop):
    """Its own clipping; whole values by ``summon_full_params``, whose names have the wrappers' in them."""

    model: FullyShardedDataParallel

    def clip(self, limit: float) -> Tensor:
        return self.model.clip_grad_norm_(limit).detach().clone()

    def parameters(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return {canonical(name): value.detach().clone() for name, value in self.model.named_parameters()}

    def freeze(self, names: Collection[str]) -> None:
        for name, parameter in self.model.named_parameters():
            if canonical(name) in names:
                parameter.requires_grad_(False)

    def gradients(self) -> dict[str, Tensor | None]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False, with_grads=True):
            trained = [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]
            return {canonical(name): value.grad.detach().clone() for name, value in trained if value.grad is not None}


def canonical(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


class Fsdp1:
    """Units wrapped through a CustomPolicy, then the root.

    ``use_orig_params=True`` throughout: it is what PyTorch recommends, the only mode in which a unit may mix frozen and
    trainable parameters, and the one whose optimizer sees parameters (False lets the optimizer update padding too).
    """

    features = Features(
        promises=PROMISES,
        accepts=ORDINARY - {"parameter-groups", "inference-mode"}
        | {"routed", "bare-units"},  # its pieces all have one dimension
        observables=frozenset({"params", "grads", "grad_norm"}),
        arithmetic=ArithmeticRule(unused="zero-in-used-unit"),
        global_norm=GlobalNormRule(nested=True, dtype="float32", eps=1e-6),
    )

    loop: Callable[[FullyShardedDataParallel, Setup], Loop] = Loop

    def strategy(self, mesh: MeshSpec) -> ShardingStrategy:
        if mesh.dp_replicate > 1:
            hybrid = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
            return hybrid[0] if mesh.reshard_after_forward else hybrid[1]
        return ShardingStrategy.FULL_SHARD if mesh.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP

    def build(self, model: nn.Module, setup: Setup) -> Loop:
        units = {id(model.get_submodule(name)) for names in setup.units for name in names}
        strategy, computes = self.strategy(setup.mesh), setup.compute_dtype
        hybrid = setup.mesh.dp_replicate > 1 and strategy is not ShardingStrategy.NO_SHARD
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"\s*.* has both parameters with requires_grad=True and False")
            wrapped = FullyShardedDataParallel(
                model,
                sharding_strategy=strategy,
                device_mesh=mesh_of(setup, "dp_shard") if hybrid else None,
                auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
                device_id=setup.device,
                use_orig_params=True,
                mixed_precision=MixedPrecision(computes, torch.float32) if computes is not None else None,
            )
        return self.loop(wrapped, setup)
