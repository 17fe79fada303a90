"""Hugging Face accelerate: FSDP2 by ``FullyShardedDataParallelPlugin``, each unit by the name of a class of its own.

What is wrapped is named by class, and any other policy of one's own is left aside without a word (1.15).

On a CPU ``Accelerator`` takes the plugin and trains with DistributedDataParallel all the same: there the plugin is put
in its state by hand, after which it prepares, clips and steps as on a GPU. It is put there again behind ``prepare``,
whose optimizer makes the state anew; ``no_sync`` and ``clip_grad_norm_`` go by it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn

from fsdpcheck.adapters.contract import Features, Setup
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop


class Loop(TrainingLoop):
    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any, setup: Setup) -> None:
        super().__init__(model, setup, optimizer=optimizer)
        self._accelerator: Any = accelerator

    def reducing(self, number: int, last: int) -> AbstractContextManager[object]:
        return nullcontext() if self.reduces(number, last) else self._accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def clip(self, limit: float) -> Tensor:
        norm: Tensor = self._accelerator.clip_grad_norm_(self.model.parameters(), limit)
        return norm


class Accelerate:
    name = "accelerate"
    features = Features(
        promises=frozenset({"plain", "global-norm", "sharded"}),
        accepts=ORDINARY - {"hsdp", "bfloat16", "inference-mode"},  # the last as fully_shard
        observables=frozenset({"params", "grads", "grad_norm"}),
        reasons={**PLAIN_REASONS, "thawing": "is asked of fully_shard, with which it shards"},
        rank_local=tuple(
            f"accelerate.state:{name}._shared_state" for name in ("PartialState", "AcceleratorState", "GradientState")
        ),
    )

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        classes = {name for names in setup.units for name in map(partial(_named_apart, model), names)}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=setup.mesh.reshard_after_forward,
            cpu_ram_efficient_loading=False,
            auto_wrap_policy="transformer_based_wrap" if classes else "no_wrap",
            transformer_cls_names_to_wrap=sorted(classes) or None,
        )
        accelerator = Accelerator(cpu=True)
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        model, optimizer = accelerator.prepare(model, setup.optimizer(model.parameters()))
        accelerator.state.distributed_type = DistributedType.FSDP
        return Loop(accelerator, model, optimizer, setup)


def _named_apart(model: nn.Module, name: str) -> str:
    """Give a unit of the model a class of its own, of a name that nothing else has; return that."""
    unit = model.get_submodule(name)
    kind = type(unit)
    unit.__class__ = type(f"Unit{kind.__name__}{name.replace('.', '_')}", (kind,), {})
    return type(unit).__name__


adapter = Accelerate()
