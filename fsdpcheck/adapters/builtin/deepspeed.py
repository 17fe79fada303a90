"""DeepSpeed's ZeRO-1, 2 and 3: flat shards of float32 masters and their state, of gradients, of parameters.

Needs the extra ``fsdpcheck[deepspeed]``. How a training is made and stepped is in _deepspeed.py.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Literal

from torch import nn

from fsdpcheck.adapters.builtin import _deepspeed
from fsdpcheck.adapters.contract import ArithmeticRule, Features, GlobalNormRule, Setup
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop


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
        return _deepspeed.training(model, setup, self._stage)

    def read(self, folder: str, model: nn.Module) -> None:
        _deepspeed.read(folder, model)


zero1, zero2, zero3 = DeepSpeed(1, reads=False), DeepSpeed(2), DeepSpeed(3)
zero1_read = DeepSpeed(1)
"""A known finding: ZeRO-1 saves no frozen parameters where zero_to_fp32 looks for them, and a model that is filled from
its checkpoint keeps its own, without a word (DeepSpeed#5439)."""
adapter = zero1
gc.freeze()  # ZeRO-3 collects garbage whenever an engine is made: what is imported by now need not be gone through
