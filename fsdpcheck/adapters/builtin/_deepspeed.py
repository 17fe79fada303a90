"""DeepSpeed as one trains with it: its engine around a model, an optimizer and a config.

Buckets are small, so that a small model fills several, and no parameter is too small to be sharded.
What is promised of it, and why not more, is in deepspeed.py. Tried with deepspeed 0.19.8.
"""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from fsdpcheck.adapters.contract import Batch, Setup
from fsdpcheck.adapters.training_loop import TrainingLoop

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own imports are deprecated
    import deepspeed
    from deepspeed.utils import safe_get_full_grad
    from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, and go round torch.distributed
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
_BUCKETS = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"), 64)


class Loop(TrainingLoop):
    """The engine divides by W before it sums, clips within its step, and drops the gradients behind it."""

    def step(self, batch: Batch) -> None:
        self.accumulate(batch)
        self.setup.notify("after_reduce", self)
        trained = {name: value for name, value in self.named.named_parameters() if value.requires_grad}
        self._gradients = {name: safe_get_full_grad(value) for name, value in trained.items()}
        self.setup.notify("before_step", self)
        engine: Any = self.model
        engine.step()
        self._grad_norm = engine.get_global_grad_norm()

    def reducing(self, number: int, last: int) -> AbstractContextManager[object]:
        self.model.set_gradient_accumulation_boundary(number == last)  # type: ignore[operator]
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)  # type: ignore[operator]

    def parameters(self) -> dict[str, Tensor]:
        named = dict(self.named.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: value.detach().clone() for name, value in named.items()}

    def gradients(self) -> dict[str, Tensor | None]:
        return self._gradients

    def save(self, folder: str) -> None:
        self.model.save_checkpoint(folder, tag="saved")  # type: ignore[operator]

    def load(self, folder: str) -> None:
        self.model.load_checkpoint(folder, tag="saved")  # type: ignore[operator]

    def local_tensors(self) -> list[Tensor]:
        zero: Any = self.optimizer
        sharded = hasattr(zero, "fp32_partitioned_groups_flat")
        masters = zero.fp32_partitioned_groups_flat if sharded else zero.single_partition_of_fp32_groups
        return [*(getattr(value, "ds_tensor", value).detach() for value in self.named.parameters()), *masters]


def training(model: nn.Module, setup: Setup, stage: int) -> Loop:
    """``model`` under ZeRO-1, 2 or 3."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **_BUCKETS},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": setup.step.max_grad_norm or 0.0,
    }
    optimizer = setup.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return Loop(engine, setup, named=model, optimizer=optimizer)


def read(folder: str, model: nn.Module) -> None:
    """Fill ``model`` from what ``Loop.save`` wrote."""
    load_state_dict_from_zero_checkpoint(model, folder, "saved")
