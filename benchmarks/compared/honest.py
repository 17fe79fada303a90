"""The honest scripts: how each is started on W ranks, on which numbers of ranks it is compared, and what it shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SCRIPTS: Final = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Honest:
    """A script of ``scripts/`` that computes the same on any of ``ranks``, up to rounding.

    ``line``: its arguments; a word in braces is an expression of W, the number of ranks. ``ranks``: the first is what
    the others are compared with. ``shows``: which part of torch, or of how people write, it is there for. ``told``:
    what a comparison has to say of it beside "agrees", for instance that dropout was drawn; "" for nothing.
    ``quiet``: arguments that turn off what is told.
    """

    name: str
    line: str
    ranks: tuple[int, ...]
    shows: str
    told: str = ""
    quiet: str = ""

    @property
    def path(self) -> Path:
        return SCRIPTS / f"{self.name}.py"

    def arguments(self, world_size: int, *, quiet: bool = False) -> list[str]:
        """Its arguments on that many ranks; ``quiet``: with what is told turned off."""
        line = f"{self.line} {self.quiet}" if quiet else self.line
        return re.sub(r"\{([^{}]+)\}", lambda word: str(_value(word[1], world_size)), line).split()


def _value(expression: str, world_size: int) -> int:
    return int(eval(expression, {"__builtins__": {}, "min": min, "max": max}, {"W": world_size}))


HONEST: Final = (
    Honest("ddp_mlp", "--batch-size {24//W} --steps 5", (1, 2, 3, 4), "DistributedDataParallel and SGD"),
    Honest("ddp_accumulate", "--accumulate {12//W}", (1, 2, 3, 4), "accumulation, no_sync, clip_grad_norm_"),
    Honest("fsdp2_transformer", "--batch-size {12//W}", (1, 2, 3, 4), "fully_shard, AdamW, clipping of DTensors"),
    Honest("zero_optimizer", "--batch-size {24//W}", (1, 2, 3, 4), "ZeroRedundancyOptimizer, DistributedSampler"),
    Honest("adamw_schedule", "--batch-size {24//W}", (1, 2, 3, 4), "parameter groups, LambdaLR, averaged weights"),
    Honest("tied_lm", "--batch-size {12//W}", (1, 2, 3, 4), "gradients averaged by hand, tied weights, clipping"),
    Honest("tensor_parallel", "--steps 5", (1, 2, 3, 4), "parallelize_module by columns and rows, one batch for all"),
    Honest("fsdp1_orig_params", "--batch-size {24//W}", (1, 2, 3, 4), "FSDP1, use_orig_params, its clip_grad_norm_"),
    Honest("ddp_buckets", "--batch-size {24//W}", (1, 2, 3, 4), "static graph, small buckets, a hook, frozen layers"),
    Honest("fsdp1_flat", "--batch-size {24//W}", (1, 2, 3, 4), "FSDP1 with flat parameters, accumulation"),
    Honest("fsdp2_bf16", "--batch-size {24//W}", (1, 2, 3, 4), "MixedPrecisionPolicy, set_requires_gradient_sync"),
    Honest("hsdp", "--batch-size {16//W} --replicas {max(1, W//2)}", (1, 2, 4), "fully_shard on a mesh of two axes"),
    Honest("tp_fsdp2", "--batch-size {16*min(2, W)//W} --tp {min(2, W)}", (1, 2, 4), "both parallelisms"),
    Honest("pipeline", "--steps 5", (2, 4), "PipelineStage, 1F1B; it needs two ranks, which four are compared with"),
    Honest(
        "sampler_dropout", "--batch-size {12//W} --epochs 2", (1, 2, 3, 4), "a shuffling sampler, epochs, dropout",
        told="dropout is drawn in the forward, by each rank for its rows", quiet="--dropout 0",
    ),
    Honest("grad_scaler", "--batch-size {24//W}", (1, 2, 3, 4), "GradScaler, autocast to float16, a scale that grows"),
    Honest("conv_groupnorm", "--batch-size {12//W}", (1, 2, 3, 4), "convolutions, GroupNorm, augmentation by index"),
    Honest("conv_syncbn", "--batch-size {24//W}", (1, 2, 3, 4), "batch norm over all ranks, buffers"),
    Honest("gan", "--batch-size {24//W}", (1, 2, 3, 4), "two models, two optimizers, a module used past its wrapper"),
    Honest("checkpoint_resume", "--batch-size {12//W}", (1, 2, 3, 4), "dcp.save, dcp.load, torch.save, new optimizer"),
    Honest("token_weighted", "--accumulate {12//W}", (1, 2, 3, 4), "padding, a loss by the number of all tokens"),
    Honest("tensor_parallel_manual", "--steps 5", (1, 2, 3, 4), "autograd functions that reduce, no DTensor"),
)  # fmt: skip
BY_NAME: Final = {script.name: script for script in HONEST}
