"""Lightning Fabric: FSDP2 by ``ModelParallelStrategy``, each unit by ``fully_shard`` in its ``parallelize_fn``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fsdpcheck.adapters.contract import Features, Setup
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop


class Launched(TorchElasticEnvironment):  # type: ignore[misc]
    """Ranks that somebody else has started, told by their process group."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None: ...

    world_size = staticmethod(dist.get_world_size)
    global_rank = local_rank = staticmethod(dist.get_rank)


class Loop(TrainingLoop):
    def __init__(self, fabric: Fabric, model: nn.Module, optimizer: Any, setup: Setup, named: nn.Module) -> None:
        super().__init__(model, setup, named=named, optimizer=optimizer)
        self._fabric: Any = fabric

    def reducing(self, number: int, last: int) -> AbstractContextManager[object]:
        waits: AbstractContextManager[object] = self._fabric.no_backward_sync(
            self.model, enabled=not self.reduces(number, last)
        )
        return waits

    def backward(self, loss: Tensor) -> None:
        self._fabric.backward(loss)

    def clip(self, limit: float) -> Tensor:
        norm: Tensor = self._fabric.clip_gradients(self.model, self.optimizer, max_norm=limit, error_if_nonfinite=False)
        return norm


class LightningFabric:
    name = "lightning_fabric"
    features = Features(
        promises=frozenset({"plain", "global-norm", "sharded"}),
        accepts=ORDINARY - {"hsdp", "bfloat16", "inference-mode"},  # the last as fully_shard
        observables=frozenset({"params", "grads", "grad_norm"}),
        reasons={**PLAIN_REASONS, "thawing": "is asked of fully_shard, with which it shards"},
    )

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            reshard = setup.mesh.reshard_after_forward
            for name in (name for names in setup.units for name in names):
                fully_shard(module.get_submodule(name), mesh=mesh["data_parallel"], reshard_after_forward=reshard)
            fully_shard(module, mesh=mesh["data_parallel"], reshard_after_forward=reshard)
            return module

        strategy = ModelParallelStrategy(parallelize, data_parallel_size=setup.world_size, tensor_parallel_size=1)
        fabric = Fabric(accelerator="cpu", strategy=strategy, devices=setup.world_size, plugins=[Launched()])
        fabric.launch()
        wrapped = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(setup.optimizer(model.parameters()))
        return Loop(fabric, wrapped, optimizer, setup, named=model)


adapter = LightningFabric()
