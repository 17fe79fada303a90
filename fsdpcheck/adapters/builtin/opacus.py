"""What is promised of Opacus' ghost clipping over FSDP2, what it documents, and what it gets wrong: a variant for each.

Needs the extra ``fsdpcheck[opacus]``. How it is wired and stepped is in _opacus.py. Tried with opacus 1.6.0.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn

from fsdpcheck.adapters.builtin import _opacus, _opacus_sampler
from fsdpcheck.adapters.capabilities import Sampler, SamplerSetup
from fsdpcheck.adapters.contract import ArithmeticRule, FactorRule, Features, Promise, Setup, Trait

_REASONS = {
    "exact-factors": "forms a norm of per-parameter norms, whose rounding is in its clip factors",
    "plain": "clips every step: it has no plain training",
    "padding.zero": "shards by FSDP2, which hides the padding of a last shard",
    "padding.unread": "shards by FSDP2, which hides the padding of a last shard",
    "nonfinite": "documents nothing about samples whose norm is NaN or infinite",
    "deferred": "computes norms inside the first backward",
    "global-norm": "clips per sample: it has no global gradient norm",
    "partial-norms": "every rank forms whole norms of its own samples",
    "second-backward": "its factors carry the rounding of nested norms; the exact-norm tiers judge it",
    "bookkeeping": "takes a second backward through the re-weighted losses",
    "noise": "asked of the variants opacus and opacus:sound",
    "accounted": "asked of the variants opacus and opacus:sound",
    "engine": "takes the rate from the number of batches, and N from the length of the data set",
    "noise-of-seed": "draws parameter by parameter from one generator a rank: its bits depend on what was drawn before",
    "state": "has no checkpoint of its own: what is saved is up to its user",
    "resharded": "has no checkpoint of its own: what is saved is up to its user",
    "across-samples": "refuses BatchNorm by its type, and looks at nothing else that computes across samples",
    "thawing": "clips every step, and thawing is asked of plain training",
    "readable": "has no checkpoint of its own: what is saved is up to its user",
    "stored": "has no checkpoint of its own: what is saved is up to its user",
    "lifecycle": "shards by FSDP2, which gathers the next unit ahead and has no public view of what is gathered",
    "epochs": "leaves the order of epochs to the data loader it is given",
    "poisson": "asked of the variants opacus, opacus:poisson and opacus:one_stream",
    "same-draws": "every rank draws from a generator of its own",
    "kernels": "forms norms by einsum, layer by layer: it has no kernels",
    "hooks": "runs each layer's norm in hooks of its own and two backwards, so that a user's fire twice",
    "parameter-hooks": "sets gradients that autograd does not see",
    "memory": "shards by FSDP2; nothing is asked of private training",
    "copies": "shows nothing by itself: what is shown is the adapter's copy",
    "interrupts": "documents no way back from a backward that raised",
    "features": "clips every step: features are asked of plain training",
    "features.broadcast": "its FSDP2Wrapper shards what each rank has built; only its data-parallel wrapper sends it",
    "dataset-order": "leaves each rank with the norms of its own samples",
}
_ACCEPTS: frozenset[Trait] = frozenset(
    {
        "bias", "tokens", "sequence", "padding_idx", "layer-norm", "frozen", "root-parameters", "keep-unsharded",
        "ragged", "empty-rank", "wrap-around", "micro-batches", "momentum", "weight-decay", "adamw", "float32",
        "rows<ranks", "uneven-rows", "project", "conv-private", "group-norm-private", "rms-norm-private",
        "attention-private", "bags-private", "layer-norm-without-bias", "surrogates", "adam", "schedule", "resume",
        "real", "secure-noise", "beside-private", "same-padding-private", "padding-mode-private",
    }
)  # fmt: skip
"""What Opacus documents, or its examples do, so that what then fails is a finding. Not "tied-private": "Parameter
tying is not supported with FSDP" (GradSampleHooksFastGradientClippingFSDP). Not "fractional-normaliser": make_private
takes N off a data loader, as an int. Not "no-sync", "replicated" and "mean": nowhere documented; its data loaders are
sharded, and it normalises by itself."""

KNOWN: dict[Trait, str] = {
    "padding_idx": "compute_embedding_norm_sample counts the gradient of the padding row, which nn.Embedding drops",
    "rows<ranks": "add_noise adds noise that is no DTensor, which replicates gradients with fewer rows than ranks; the"
    " optimizer's in-place update of the sharded parameter then raises",
    "empty-rank": "norms of an Embedding, a convolution or a normalization raise for 0 samples, on that rank alone",
    "bags-private": "compute_embeddingbag_gradsampler unpacks (input, offsets): bags without offsets raise ValueError",
    "layer-norm-without-bias": "compute_layer_norm_grad_sample asks None for requires_grad: AttributeError",
    "padding-mode-private": "compute_conv_grad_sample pads with zeros whatever padding_mode says, in silence",
    "beside-private": "hooks see what a layer is called with: a use of its weight without it is in no norm, in silence",
}
"""Traits that Opacus 1.6.0 accepts and gets wrong, with the cause; each was seen on real gloo processes too."""


Poisson = Literal["no", "as released", "repaired", "seeded alike, repaired"]
"""What is promised of Poisson sampling: nothing, or of Opacus' sampler as it is, or with empty draws put back, its
ranks seeded apart or alike."""


class Loop(_opacus.Loop):
    """With what its accountant was given."""

    def accounted(self) -> list[tuple[float, float, int]]:
        return list(self.engine.accountant.history)


class GhostFsdp(_opacus.GhostFsdp):
    """With what is promised and accepted of it, and how a user of ``loss_reduction`` "sum" divides."""

    loop: type[_opacus.Loop] = Loop

    def __init__(
        self,
        name: str,
        accepts: frozenset[Trait],
        loss_reduction: Literal["mean", "sum"] = "mean",
        poisson: Poisson = "no",
        noise: bool = False,
    ) -> None:
        self.name, self.reduction, self._poisson = name, loss_reduction, poisson
        promised: frozenset[Promise] = frozenset({"private", "sharded"})
        promised |= {"poisson"} if poisson != "no" else set()
        promised |= {"noise", "accounted"} if noise else set()
        self.features = Features(
            promises=promised,
            accepts=accepts,
            observables=frozenset({"params", "grads", "norms", "factors", *(("accounted",) if noise else ())}),
            owns_loss_scale=True,
            arithmetic=ArithmeticRule(
                divides_by_share=loss_reduction == "mean"
            ),  # DPOptimizerFastGradientClipping.scale_grad
            factor=FactorRule(eps=1e-6, expression="reciprocal", nested=True),
            reasons={promise: reason for promise, reason in _REASONS.items() if promise not in promised},
        )

    def sampler(self, setup: SamplerSetup) -> Sampler:
        alike, repaired = self._poisson == "seeded alike, repaired", self._poisson.endswith("repaired")
        return _opacus_sampler.Poisson(setup, alike, repaired)

    def build(self, model: nn.Module, setup: Setup) -> _opacus.Loop:
        if "beside-private" not in self.features.accepts:
            _refuse_beside(model)
        made = super().build(model, setup)
        if self.reduction == "sum":
            self.normalise(made.optimizer, setup.step.normaliser)
        return made

    def normalise(self, optimizer: Any, normaliser: float) -> None:
        """Have the gradients of a step divided by N, where Opacus sums losses."""
        optimizer.attach_step_hook(partial(divide, normaliser))


def _refuse_beside(model: nn.Module) -> None:
    """Raise NotImplementedError for a model of drawn layers in which a weight is used beside its layer."""
    for name, module in model.named_modules():
        if "beside" in getattr(module, "used", {}).values():
            raise NotImplementedError(f"{name} uses a weight beside its layer, of which Opacus' norms know nothing")


def divide(normaliser: float, optimizer: Any) -> None:
    """What a user of loss_reduction "sum" does to a step's gradients. The accountant is not asked."""
    for parameter in optimizer.params:
        parameter.grad.div_(normaliser)


_SOUND = frozenset(_ACCEPTS - KNOWN.keys())

adapter = GhostFsdp("opacus", _ACCEPTS, poisson="as released", noise=True)
"""All that Opacus documents."""
sound = GhostFsdp("opacus without known findings", _SOUND, poisson="repaired", noise=True)
"""Whatever is found here is new, or a false alarm."""
padding_idx = GhostFsdp("opacus, padding_idx", _SOUND | {"padding_idx"})
few_rows = GhostFsdp("opacus, rows<ranks", _SOUND | {"rows<ranks", "uneven-rows"})
empty_ranks = GhostFsdp("opacus, empty-rank", _SOUND | {"empty-rank"})
bags = GhostFsdp("opacus, bags", _SOUND | {"bags-private"})
unbiased = GhostFsdp("opacus, layer-norm-without-bias", _SOUND | {"layer-norm-without-bias"})
padding_mode = GhostFsdp("opacus, padding_mode of convolutions", _SOUND | {"padding-mode-private"})
beside = GhostFsdp("opacus, weights used beside their layers", _SOUND | {"beside-private"})
summing = GhostFsdp("opacus, loss_reduction sum", _SOUND, "sum")
poisson = GhostFsdp("opacus, Poisson sampling", _SOUND, poisson="as released")
one_stream = GhostFsdp("opacus, ranks seeded alike", _SOUND, poisson="seeded alike, repaired")
"""One known finding each, so that none hides another. ``summing`` releases 1/W of the sum: FSDP still averages."""
