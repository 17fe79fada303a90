"""What each trait means, in a few words, for the list of traits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpcheck.case import Trait

MEANINGS: dict[Trait, str] = {
    "bias": "a layer with a bias",
    "tokens": "inputs are token numbers, through an Embedding",
    "sequence": "inputs [n, T, d]: Linear layers see a sequence",
    "padding_idx": "an Embedding with a padding_idx, whose row has no gradient",
    "layer-norm": "a LayerNorm",
    "tied": "one weight in two layers, in plain training",
    "tied-private": "one weight in two layers, under per-sample clipping",
    "frozen": "parameters that are not trained",
    "root-parameters": "layers outside of all units, left to the root",
    "keep-unsharded": "reshard_after_forward=False",
    "replicated": "every rank takes the whole batch",
    "replicated-shards": "the ranks that shard one replica take the same samples",
    "ragged": "ranks have unequal numbers of samples",
    "empty-rank": "some forward of some rank sees no sample",
    "wrap-around": "a sample occurs twice in a batch, as samplers pad",
    "micro-batches": "several micro-batches a step",
    "no-sync": "gradients are reduced after the last micro-batch only",
    "mean": "the loss is the mean over a rank's samples",
    "momentum": "SGD with momentum",
    "weight-decay": "an optimizer with weight decay",
    "adamw": "AdamW",
    "float32": "parameters in float32",
    "rows<ranks": "more ranks than rows of some parameter",
    "uneven-rows": "the ranks do not divide the rows of some parameter",
    "project": "parameters are rounded between steps: needs local_tensors",
    "hsdp": "shards on one mesh axis, replicas on another",
    "layer-norm-without-bias": "a LayerNorm without a bias",
    "conv": "a convolution, in plain training",
    "group-norm": "a GroupNorm, in plain training",
    "rms-norm": "an RMSNorm, in plain training",
    "attention": "self-attention, in plain training",
    "bags": "an EmbeddingBag, in plain training",
    "conv-private": "a convolution, under per-sample clipping",
    "group-norm-private": "a GroupNorm, under per-sample clipping",
    "rms-norm-private": "an RMSNorm, under per-sample clipping",
    "attention-private": "self-attention, under per-sample clipping",
    "bags-private": "an EmbeddingBag, under per-sample clipping",
    "surrogates": "functions off the grid run as exact surrogates",
    "real": "real numbers, judged by replay",
    "adam": "Adam",
    "schedule": "the learning rate changes between steps",
    "resume": "the optimizer's state is saved and loaded between steps",
    "premultiply": "averages multiply by 1/W before they sum",
    "per-layer-clipping": "a clip norm for each group of parameters",
    "bfloat16": "the model computes in bfloat16; reductions, norms and parameters are float32",
    "tf32": "products of matrices may round their factors to TF32",
    "fractional-normaliser": "the normaliser N is no whole number, as an expected batch size may be",
    "own-layers": "modules of the user's own with parameters",
}
