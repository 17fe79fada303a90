"""The words for what a case can demand of an implementation, and all that is known of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Trait = Literal[
    "bias", "tokens", "sequence", "padding_idx", "layer-norm", "tied", "tied-private", "frozen", "root-parameters",
    "keep-unsharded", "replicated", "replicated-shards", "ragged", "empty-rank", "wrap-around", "micro-batches",
    "no-sync", "mean", "momentum", "weight-decay", "adamw", "float32", "rows<ranks", "uneven-rows", "project", "hsdp",
    "layer-norm-without-bias", "conv", "group-norm", "rms-norm", "attention", "bags",
    "conv-private", "group-norm-private", "rms-norm-private", "attention-private", "bags-private",
    "surrogates", "real", "adam", "schedule", "resume", "premultiply", "per-layer-clipping", "own-layers",
    "bfloat16", "tf32", "fractional-normaliser", "routed", "routed-private", "routed-alone", "reused",
    "reused-private", "evaluation", "inference-mode", "rebuilt", "parameter-groups", "one-row", "one-row-private",
    "tied-apart", "thawed", "frozen-again", "spelled-out-private", "unequal-micro-batches", "matrix-optimizer",
    "row-optimizer",
    "unit-groups",
    "several-heads-private", "same-padding-private", "mean-bags-private", "dropped", "dropped-private",
    "secure-noise", "beside-private", "across-samples-private", "padding-mode-private", "masked-private",
    "bare-units",
]  # fmt: skip
"""A key of TRAITS; ``Case.requires()`` gives a case's set, and ``Features.accepts`` must cover it."""


@dataclass(frozen=True, slots=True)
class TraitRow:
    """What one trait means, in a few words, and what it asks an implementation for: names of ``fsdpcheck.adapter``.

    ``own``: a user's model can demand it by itself. ``low_precision``: of which models cases with it may compute in few
    bits. Of none where it is on no grid of those, or has kernels for bfloat16 whose sums are not promised to be
    float32's; of a user's own where surrogates on whole numbers make it exact. ``private``: what a family of layers
    demands in its place under per-sample clipping. ``ranks``: the fewest on which a case can have it; ``no_prime``: and
    not on a prime number of them.
    """

    meaning: str
    needs: tuple[str, ...] = ()
    own: bool = False
    low_precision: Literal["any", "own", "none"] = "any"
    private: Trait | None = None
    ranks: int = 1
    no_prime: bool = False


_RULE: Final = ("a norm rule of the layer",)
_OPTIMIZER: Final = ("Setup.optimizer",)

TRAITS: Final[Mapping[Trait, TraitRow]] = {
    "bias": TraitRow("a layer with a bias", own=True),
    "tokens": TraitRow("inputs are token numbers, through an Embedding", own=True),
    "sequence": TraitRow("inputs [n, T, d]: Linear layers see a sequence, as they do behind tokens", own=True),
    "padding_idx": TraitRow("an Embedding with a padding_idx, whose row has no gradient", own=True),
    "layer-norm": TraitRow("a LayerNorm", own=True, low_precision="own"),
    "tied": TraitRow("one weight in two layers, in plain training", own=True, private="tied-private"),
    "tied-private": TraitRow("one weight in two layers, under per-sample clipping"),
    "frozen": TraitRow("parameters that are not trained", own=True),
    "root-parameters": TraitRow("layers outside of all units, left to the root", own=True),
    "keep-unsharded": TraitRow("reshard_after_forward=False"),
    "replicated": TraitRow("every rank takes the whole batch", ranks=2),
    "replicated-shards": TraitRow("the ranks that shard one replica take the same samples", ranks=4, no_prime=True),
    "ragged": TraitRow("ranks have unequal numbers of samples", ranks=2),
    "empty-rank": TraitRow("some forward of some rank sees no sample"),
    "wrap-around": TraitRow("a sample occurs twice in a batch, as samplers pad"),
    "micro-batches": TraitRow("several micro-batches a step"),
    "no-sync": TraitRow("gradients are reduced after the last micro-batch only"),
    "mean": TraitRow("the loss is the mean over a rank's samples"),
    "momentum": TraitRow("SGD with momentum"),
    "weight-decay": TraitRow("an optimizer with weight decay"),
    "adamw": TraitRow("AdamW"),
    "float32": TraitRow("parameters in float32"),
    "rows<ranks": TraitRow("more ranks than rows of some parameter", ranks=2),
    "uneven-rows": TraitRow("the ranks do not divide the rows of some parameter", ranks=2),
    "project": TraitRow("parameters are rounded between steps", needs=("Observed.local_tensors",)),
    "hsdp": TraitRow("shards on one mesh axis, replicas on another", ranks=2),
    "layer-norm-without-bias": TraitRow("a LayerNorm without a bias, off the grid", own=True, low_precision="own"),
    "conv": TraitRow("a convolution, in plain training", own=True, low_precision="own", private="conv-private"),
    "group-norm": TraitRow("a GroupNorm, in plain training, off the grid", own=True, private="group-norm-private"),
    "rms-norm": TraitRow("an RMSNorm, in plain training, off the grid", own=True, private="rms-norm-private"),
    "attention": TraitRow("self-attention, in plain training, off the grid", own=True, private="attention-private"),
    "bags": TraitRow("an EmbeddingBag, in plain training", own=True, low_precision="none", private="bags-private"),
    "conv-private": TraitRow("a convolution, under per-sample clipping", _RULE, low_precision="none"),
    "group-norm-private": TraitRow("a GroupNorm, under per-sample clipping", _RULE),
    "rms-norm-private": TraitRow("an RMSNorm, under per-sample clipping", _RULE),
    "attention-private": TraitRow("self-attention, under per-sample clipping", _RULE),
    "bags-private": TraitRow("an EmbeddingBag, under per-sample clipping", _RULE, low_precision="none"),
    "surrogates": TraitRow("functions off the grid run as exact surrogates", own=True, low_precision="own"),
    "real": TraitRow("real numbers, judged by replay"),
    "adam": TraitRow("Adam"),
    "schedule": TraitRow("the learning rate changes between steps", _OPTIMIZER),
    "resume": TraitRow("the optimizer's state is saved and loaded between steps", _OPTIMIZER),
    "premultiply": TraitRow("averages multiply by 1/W before they sum"),
    "per-layer-clipping": TraitRow("a clip norm for each group of parameters", ("Setup.clip_bounds",)),
    "own-layers": TraitRow("modules of the user's own with parameters, of a kind that no other trait names", own=True,
                           low_precision="own"),
    "bfloat16": TraitRow("the model computes in bfloat16; reductions, norms and parameters are float32",
                         ("Setup.compute",)),
    "tf32": TraitRow("products of matrices may round their factors to TF32", ("Setup.compute",)),
    "fractional-normaliser": TraitRow("the normaliser N is no whole number, as an expected batch size may be"),
    "routed": TraitRow("a layer that some samples leave out, in plain training", low_precision="none",
                       private="routed-private"),
    "routed-private": TraitRow("a layer that some samples leave out, under per-sample clipping", low_precision="none"),
    "routed-alone": TraitRow("a unit, or the root, of which a forward may use no trained parameter"),
    "reused": TraitRow("a layer that runs twice in a forward, in plain training", low_precision="none",
                       private="reused-private"),
    "reused-private": TraitRow("a layer that runs twice in a forward, under per-sample clipping", low_precision="none"),
    "evaluation": TraitRow("a forward without gradients, in eval mode, before each step", ("Observed.evaluate",)),
    "inference-mode": TraitRow("that forward in torch.inference_mode", ("Observed.evaluate",)),
    "rebuilt": TraitRow("another model is built and trained before in the same process"),
    "parameter-groups": TraitRow("an optimizer of two groups: vectors have other options", _OPTIMIZER),
    "one-row": TraitRow("a layer that runs on one row for all samples, in plain training", low_precision="none",
                        private="one-row-private"),
    "one-row-private": TraitRow("a layer that runs on one row for all samples, under per-sample clipping",
                                low_precision="none"),
    "tied-apart": TraitRow("layers of two sharding units that share one weight"),
    "thawed": TraitRow("frozen parameters that are trained from the second step on", ("Observed.thaw",),
                       low_precision="none"),
    "frozen-again": TraitRow("what is thawed is frozen again from the third step on", ("Observed.freeze",),
                             low_precision="none"),
    "spelled-out-private": TraitRow("a user's layer that spells out roots, cosines, shares or top-k, under"
                                    " per-sample clipping on a grid: its forward is run again, and no formula of its"
                                    " own is known of it", own=True, low_precision="none"),
    "unequal-micro-batches": TraitRow("some ranks have one micro-batch fewer in a step", ranks=2),
    "matrix-optimizer": TraitRow("an optimizer whose update of a matrix depends on all of it, as Muon's", _OPTIMIZER,
                                 low_precision="none"),
    "row-optimizer": TraitRow("an optimizer whose update of an element depends on its row of the matrix, as norms"
                              " of rows make it", _OPTIMIZER, low_precision="none"),
    "unit-groups": TraitRow("an optimizer of two groups: parameters of the last unit have other options", _OPTIMIZER),
    "several-heads-private": TraitRow("an nn.MultiheadAttention, under per-sample clipping", _RULE),
    "same-padding-private": TraitRow('a convolution with padding="same", under per-sample clipping', _RULE,
                                     low_precision="none"),
    "mean-bags-private": TraitRow("an EmbeddingBag that averages, under per-sample clipping", _RULE,
                                  low_precision="none"),
    "dropped": TraitRow("a layer that runs and whose output nothing uses, in plain training", low_precision="none",
                        private="dropped-private"),
    "dropped-private": TraitRow("a layer that runs and whose output nothing uses, under per-sample clipping",
                                low_precision="none"),
    "secure-noise": TraitRow("noise of the generator that is called cryptographically secure", ("Setup.step",)),
    "beside-private": TraitRow("a weight that is used beside its layer too, under per-sample clipping",
                               low_precision="none"),
    "across-samples-private": TraitRow("a model or a loss that computes across the samples of a micro-batch, or puts"
                                       " them in another order for a layer, under per-sample clipping",
                                       low_precision="none"),
    "padding-mode-private": TraitRow("a convolution that is padded with numbers of its input, under per-sample"
                                     " clipping", _RULE, low_precision="none"),
    "masked-private": TraitRow("an nn.MultiheadAttention with masks, under per-sample clipping", _RULE,
                               low_precision="none"),
    "bare-units": TraitRow("a unit that is a layer itself", ("Setup.units",)),
}  # fmt: skip
"""Every trait."""
