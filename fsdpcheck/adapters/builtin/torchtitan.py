"""torchtitan's pieces: its meshes, ``apply_fsdp_to_decoder``, gradient clipping, optimizers and checkpoints.

Needs the extra ``fsdpcheck[torchtitan]``. A drawn model is no decoder: its units stand as the layers of one. Tried with
torchtitan 0.3.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torchtitan.distributed.parallel_dims as dims
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import ModelWrapper
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed import utils
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from fsdpcheck.adapters.contract import ArithmeticRule, Features, Setup
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop

dims.device_type = "cpu"  # it takes "cuda" where there is no device


class Optimizers(OptimizersContainer):  # type: ignore[misc]
    """With the drawn optimizer in place of Adam, AdamW or DistMuon, all that torchtitan makes by their names."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self._setup = setup
        every = ParamGroupConfig(pattern=".*", optimizer_name="drawn")
        super().__init__(OptimizersContainer.Config(param_groups=[every]), model_parts=[model])

    def _resolve_optimizer_factory(self, name: str) -> Any:
        return self._drawn

    def _drawn(self, groups: Any) -> Any:
        names = {value: name for one in groups for value, name in zip(one["params"], one["param_names"], strict=True)}
        optimizer = self._setup.optimizer(list(names))
        for group in optimizer.param_groups:
            group["param_names"] = [names[value] for value in group["params"]]
        return optimizer


class Loop(TrainingLoop):
    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self._states = {"model": ModelWrapper(model), "optimizer": Optimizers(model, setup)}
        super().__init__(model, setup, optimizer=self._states["optimizer"].optimizers[0])

    def clip(self, limit: float) -> Any:
        return utils.clip_grad_norm_(self.model.parameters(), limit, foreach=True)

    def save(self, folder: Path) -> None:
        state_dict_saver.save(self._states, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state_dict_loader.load(self._states, checkpoint_id=folder)


class Torchtitan:
    name = "torchtitan"
    features = Features(
        promises=frozenset({"plain", "global-norm", "sharded", "state", "resharded"}),
        accepts=ORDINARY - {"bfloat16", "inference-mode", "mean"},
        observables=frozenset({"params", "grads", "grad_norm"}),
        arithmetic=ArithmeticRule(averaging="none"),
        reasons={**PLAIN_REASONS, "thawing": "trains what it was built with", "stored": "saves as torch does"},
    )

    def build(self, model: Any, setup: Setup) -> TrainingLoop:
        sizes = {"dp_replicate": setup.mesh.dp_replicate, "dp_shard": -1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
        parallel = dims.ParallelDims(**sizes, world_size=setup.world_size, spmd_backend="partial_dtensor")
        mesh = parallel.get_mesh(["dp_replicate", "fsdp"] if parallel.dp_replicate_enabled else ["fsdp"])
        model.enable_weight_tying, model.tok_embeddings, model.norm, model.lm_head = False, None, None, None
        model.layers = {name: model.get_submodule(name) for names in setup.units for name in names}
        policy = "always" if setup.mesh.reshard_after_forward else "never"
        apply_fsdp_to_decoder(model, mesh, None, None, pp_enabled=False, reshard_after_forward_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # in float32 it premultiplies by 1, which gloo does not
                module.set_force_sum_reduction_for_comms(True)
        return Loop(model, setup)


adapter = Torchtitan()
