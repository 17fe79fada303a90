"""Which programs there are: what each is about, how it is called, and what is true of its faulty form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CATEGORIES: Final = {
    "loss": "the loss that backward is called on",
    "gradient": "a gradient as the optimizer's step begins, after clipping where there is some",
    "replicas": "ranks do not agree on a gradient, and hence on a parameter, that all of them hold",
    "parameter": "a parameter after the step, though its gradient agrees",
    "initial parameter": "a parameter before the first step of its optimizer",
    "missing gradient": "the optimizer's parameters have no gradient",
}
"""What the faulty form gets wrong, as a comparison of W ranks with one can see it -> what that is."""


@dataclass(frozen=True)
class Program:
    """``name``: of the file, without its ending. ``template``: its arguments, in which {...} is computed of W.

    ``category``: one of CATEGORIES. ``where``: parameters in which it shows at the first step, all of them if ().
    ``truth``: in words. ``ranks``: numbers of ranks to compare, 1 first. ``shown``: those at which the faulty form
    differs from itself on one rank; at the others it is the correct one, bit for bit.
    """

    name: str
    source: str
    template: str
    category: str
    where: tuple[str, ...]
    truth: str
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    shown: tuple[int, ...] = (2, 3, 4)

    @property
    def command(self) -> str:
        """What is compared; with "--form correct" behind it, the control."""
        return f"{self.name}.py {self.template}"


_SAME, _SPLIT = "--batch-size 12", "--batch-size {12//W}"
_MEGATRON = "NVIDIA/Megatron-LM issue 7452, "
_ENTANGLE = "Entangle (ASPLOS 2026; arXiv 2508.09505), "
_TRAINCHECK = "TrainCheck (OSDI 2025), "

PROGRAMS: Final = (
    Program(
        "megatron_label_smoothing", _MEGATRON + "finding 1", _SAME, "loss", (),
        "label smoothing is computed of the rank's part of the vocabulary; the loss differs, and from rank to rank",
    ),
    Program(
        "megatron_gathered_logits", _MEGATRON + "finding 2", _SAME, "loss", (),
        "gathered logits are taken for a part of the vocabulary; the loss is log(W) too large",
    ),
    Program(
        "megatron_local_token_counts", _MEGATRON + "finding 3", _SPLIT, "gradient", ("body", "second"),
        "the second loss is scaled by the ratio of each rank's own token counts",
    ),
    Program(
        "megatron_recompute_group", _MEGATRON + "finding 4", _SPLIT, "gradient", ("body", "block"),
        "a block is recomputed from an input whose parts come from other replicas",
    ),
    Program(
        "megatron_padding_mask_group", _MEGATRON + "finding 5", _SPLIT, "gradient", (),
        "tokens and padding mask are split by different layouts of ranks", (1, 2, 4), (4,),
    ),
    Program(
        "megatron_cross_attention_group", _MEGATRON + "finding 6", _SPLIT, "gradient", (),
        "keys and values are gathered from ranks of another replica", (1, 2, 4), (4,),
    ),
    Program(
        "megatron_attention_sink_norm", _MEGATRON + "finding 8", _SAME, "gradient", (),
        "the norm misses what ranks above 0 hold of `sink`, so clipping leaves gradients too long, by one factor",
    ),
    Program(
        "megatron_mean_of_means", _MEGATRON + "finding 9", _SAME, "gradient", (),
        "ranks divide by their own number of tokens and are averaged",
    ),
    Program(
        "megatron_router_counts", _MEGATRON + "finding 10", _SAME, "gradient", ("router",),
        "the auxiliary loss is scaled by all ranks' tokens instead of this rank's: W times too large",
    ),
    Program(
        "megatron_reduction_white_list", _MEGATRON + "finding 11", _SAME, "replicas", ("out_norm",),
        "the gradient of out_norm is not added up over ranks, since its name is not listed",
    ),
    Program(
        "megatron_checkpoint_keys", _MEGATRON + "finding 12", _SAME, "initial parameter", (),
        "every stage loads the layers of the first stage",
    ),
    Program(
        "megatron_context_group_restored", _MEGATRON + "finding 13", _SAME, "gradient", (),
        "from the second micro-batch on, a rank attends to its own tokens only",
    ),
    Program(
        "megatron_gather_backward", _MEGATRON + "appendix B 1", _SAME, "gradient", ("body",),
        "the backward of a gather adds up gradients that are whole: W times too large",
    ),
    Program(
        "entangle_accumulation", _ENTANGLE + "gradient accumulation",
        "--batch-size {144//W} --micro-batches {W}", "gradient", (),
        "gradients are --micro-batches times too large; it depends on W only because the template says so",
    ),
    Program(
        "entangle_reduction_switched_off", _ENTANGLE + "a wrong switch", _SAME, "replicas", (),
        "a row-parallel layer's partial sums are never added up",
    ),
    Program(
        "entangle_layernorm_gradient", _ENTANGLE + "layer norm", _SAME, "replicas", ("norm.weight", "norm.bias"),
        "the gradient of the norm is of the rank's tokens and is not added up",
    ),
    Program(
        "entangle_expert_gradient", _ENTANGLE + "experts", _SPLIT, "replicas", ("experts",),
        "the gradient of the experts is not added up over ranks",
    ),
    Program(
        "traincheck_clipped_on_one_rank", _TRAINCHECK + "deepspeed-1801", _SAME, "replicas", ("norm",),
        "the replicated norm is clipped on rank 0 only",
    ),
    Program(
        "traincheck_hooks_lost", _TRAINCHECK + "pytorch-104336", _SPLIT, "replicas", (),
        "DDP's hooks were lost when the model was converted; nothing is averaged",
    ),
    Program(
        "traincheck_wrapper_bypassed", _TRAINCHECK + "x-jxmnop-ddp-out-of-sync", _SPLIT, "replicas", (),
        "the forward does not go through DDP; nothing is averaged",
    ),
    Program(
        "traincheck_stale_optimizer", _TRAINCHECK + "accelerate issue 2665", _SPLIT, "missing gradient", (),
        "the optimizer holds parameters that no forward uses; nothing is trained",
    ),
    Program(
        "threads_expert_group_norm", "NVIDIA-NeMo/Automodel issue 3816", _SAME, "gradient", (),
        "each rank clips by the norm of what is shared and its own experts",
    ),
    Program(
        "threads_expert_norms_averaged", "deepspeedai/DeepSpeed issue 8475", _SAME, "gradient", (),
        "the norm is the mean of ranks' norms, though each has other experts; gradients too long by one factor",
    ),
    Program(
        "threads_no_sync_off_by_one", "modelscope/FunASR pull request 3472", _SPLIT, "replicas", (),
        "the first micro-batch's gradients are averaged, those of the others are not",
    ),
    Program(
        "threads_muon_of_shards", "deepspeedai/DeepSpeed issue 8437", _SAME, "parameter", (),
        "the optimizer makes each rank's shard orthogonal, not the matrix",
    ),
    Program(
        "threads_hybrid_shard_norm", "ByteDance-Seed/VeOmni issue 184", _SPLIT, "gradient", (),
        "the norm counts each copy of the model: root of 2 times too large", shown=(2, 4),
    ),
    Program(
        "threads_adapter_of_sequence_parts", "modelscope/mcore-bridge pull request 173", _SAME, "replicas", ("b",),
        "the gradient of the adapter's replicated factor is of the rank's tokens and is not added up",
    ),
    Program(
        "threads_expert_gradient_times_ranks", "pytorch/pytorch issue 160285", _SPLIT, "gradient", ("experts",),
        "the gradient of experts is W times too large",
    ),
)  # fmt: skip

NOT_BROUGHT: Final = {
    _MEGATRON + "finding 7": "its text was not found",
    _MEGATRON + "appendix B 2": "its text was not found",
    _TRAINCHECK + "pytorch-84803, pytorch-96600, baichuan2-86": "broken copies between GPUs, of hardware and drivers",
    _TRAINCHECK + "deepspeed-5794": "a hang, which a run on simulated ranks reports without a comparison",
    _TRAINCHECK + "the ten others": "they do not concern ranks; W ranks are as wrong as one",
}
"""Which bug of these sets has no program -> why."""
