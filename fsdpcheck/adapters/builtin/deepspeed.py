"""DeepSpeed's ZeRO-1, 2 and 3: flat shards of float32 masters and their state, of gradients, of parameters.

Needs the extra ``fsdpcheck[deepspeed]``. Buckets are small, so that a small model fills several, and no parameter is
too small to be sharded. Tried with deepspeed 0.19.8.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from fsdpcheck.adapters.contract import ArithmeticRule, Batch, Features, GlobalNormRule, Setup
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop

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
        masters = zero.fp32_partitioned_groups_flat if self.sharded else zero.single_partition_of_fp32_groups
        return [*(getattr(value, "ds_tensor", value).detach() for value in self.named.parameters()), *masters]

    @property
    def sharded(self) -> bool:
        return hasattr(self.optimizer, "fp32_partitioned_groups_flat")


class DeepSpeed:
    features = Features(
        promises=frozenset({"plain", "global-norm", "state", "readable"}),
        accepts=ORDINARY - {"hsdp", "bfloat16", "parameter-groups"},
        observables=frozenset({"params", "grads", "grad_norm"}),
        arithmetic=ArithmeticRule(averaging="before", dtypes=("float32",), unused="zero"),
        reasons={
            **PLAIN_REASONS,
            "thawing": "updates what is trained when it is built",
            "resharded": "loads what as many ranks have saved",
            "stored": "saves flat shards as they lie",
        },
        rank_local=(
            "deepspeed.comm.comm:cdb",
            "deepspeed.utils.groups:_WORLD_GROUP",
            "deepspeed.utils.groups:mesh_device",
            "deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK",
            "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__",
            *(
                f"deepspeed.runtime.zero.partition_parameters:Init.{name}"
                for name in ("param_id", "num_persisted_parameters", "num_persisted_elements")
            ),
        ),
    )

    def __init__(self, stage: Literal[1, 2, 3], reads: bool = True) -> None:
        self.name, self._stage = f"deepspeed, ZeRO-{stage}", stage
        if not reads:
            reasons = {**self.features.reasons, "readable": "asked of the variant zero1_read"}
            promises = self.features.promises - {"readable"}
            self.features = replace(self.features, promises=promises, reasons=reasons)
        if stage == 3:  # its norm is a float64 to the end; that of the others is cast before the sum over ranks
            self.features = replace(self.features, global_norm=GlobalNormRule(nested=True, dtype="float64", eps=1e-6))

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": self._stage, "stage3_param_persistence_threshold": 0, **_BUCKETS},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": setup.step.max_grad_norm or 0.0,
        }
        optimizer = setup.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        return Loop(engine, setup, named=model, optimizer=optimizer)

    def read(self, folder: str, model: nn.Module) -> None:
        load_state_dict_from_zero_checkpoint(model, folder, "saved")


zero1, zero2, zero3 = DeepSpeed(1, reads=False), DeepSpeed(2), DeepSpeed(3)
zero1_read = DeepSpeed(1)
"""A known finding: ZeRO-1 saves no frozen parameters where zero_to_fp32 looks for them, and a model that is filled from
its checkpoint keeps its own, without a word (DeepSpeed#5439)."""
adapter = zero1
gc.freeze()  # ZeRO-3 collects garbage whenever an engine is made: what is imported by now need not be gone through
