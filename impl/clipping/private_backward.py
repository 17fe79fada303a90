"""Private backward: the clipped gradients of one micro-batch, in any mode.

    losses [b] --first backward--> terms --aggregate--> squared norms --clipping--> factors
    factors --second backward, or contraction of what was kept--> local gradients of sum_i c_i L_i

No per-sample weight gradient is kept, and with complete contributions the norms cost no communication.

Source: Li et al. 2021, arXiv:2110.05679 (two passes); Bu et al. 2022, arXiv:2210.00038 (bookkeeping).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..costs.profile import OFF, Off, Profile
from ..noise.gaussian import Noise
from ..sharding.protocol import Sharded
from . import clip_factors as clip
from . import independence, layers, modes, nonfinite_samples, norm_aggregation, tied_parameters
from . import recorder as hooks
from .modes import Mode
from .norm_aggregation import Layout, Terms
from .records import Use
from .rules import Clipping


@dataclass(frozen=True)
class Privacy:
    """How a sample's contribution is bounded.

    ``contribution`` is "complete", "partial" or "mixed" and needs a replicated batch unless complete. ``mode`` may be
    overridden for a step: see impl/clipping/modes.py. ``nonfinite``: see nonfinite_samples.py. ``fuse_norms`` puts the
    norms of all micro-batches of a step together by one collective, before any of them is weighted.

    ``noise_multiplier`` is the noise's standard deviation over the sensitivity of the clipped sum. A sample that occurs
    k times in a logical batch moves the sum by k times the bound; ``duplicates`` on one rank are refused unless they
    are to "count". (Those on two ranks cannot be seen without telling: see sampling.refuse_wrap_around.)

    ``independence``: the first step asks, by two forwards of made-up rows, whether samples mix
    (impl/clipping/independence.py).
    """

    clipping: Clipping
    mode: Mode = modes.DEFAULT
    contribution: Literal["complete", "partial", "mixed"] = "complete"
    nonfinite: Literal["raise", "drop"] = "raise"
    fuse_norms: bool = False
    noise_multiplier: float = 0.0
    noise: Noise | None = None
    duplicates: Literal["refuse", "count"] = "refuse"
    independence: Literal["ask", "trust"] = "ask"

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"got noise_multiplier {self.noise_multiplier}, wanted a finite one that is not negative")
        if self.noise_multiplier > 0 and self.noise is None:
            raise ValueError("got a noise_multiplier and no noise: make it by noise.secure(...) or noise.seeded(...)")

    def deviation(self, normaliser: float) -> float:
        """Standard deviation of the noise on the released gradient, which is a sum divided by ``normaliser``."""
        return self.noise_multiplier * self.clipping.sensitivity / normaliser

    def mode_in_force(self) -> Mode:
        """The mode of the step that is about to begin. Raises ValueError where it cannot do what is asked."""
        mode = modes.in_force(self.mode)
        if mode.passes == "two_pass" and self.clipping.groups is not None:
            raise ValueError(
                "got per-layer clipping in two passes: a second backward gives a sample one weight for all layers;"
                " take the mode ghost_bk or flash_bk (bookkeeping)"
            )
        if mode.passes == "two_pass" and self.nonfinite == "drop":
            raise ValueError(
                "got nonfinite='drop' in two passes: a second backward meets the same NaNs, and 0 * NaN is NaN;"
                " take the mode ghost_bk or flash_bk (bookkeeping)"
            )
        if mode.passes == "two_pass" and self.fuse_norms:
            raise ValueError(
                "got fuse_norms in two passes: the graphs of all micro-batches would have to be kept;"
                " take the mode ghost_bk or flash_bk (bookkeeping)"
            )
        return mode


@dataclass(frozen=True)
class Waiting:
    """A micro-batch whose norms are not put together yet: what bookkeeping kept of it."""

    terms: Terms
    kept: Sequence[Use]
    indices: Sequence[int]
    scale: float


@dataclass
class Norms:
    """What private backwards have found on this rank since the step began, [local samples] a tensor a micro-batch.

    ``norms`` are over all parameters. ``factors`` are [b], or [G, b] with G clipping groups. ``nonfinite`` lists the
    global indices of samples without a finite norm.
    """

    norms: list[Tensor] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    nonfinite: list[int] = field(default_factory=list)


class PrivateBackward:
    """Per-sample clipping for ``model``, whose local batches are laid out as ``layout`` says."""

    def __init__(
        self,
        model: Sharded,
        privacy: Privacy,
        layout: Layout,
        notify: Callable[[Literal["after_first_backward", "after_norms"]], None],
        profile: Profile | Off = OFF,
    ) -> None:
        self.model, self.privacy, self.layout, self.notify, self.profile = model, privacy, layout, notify, profile
        found = layers.layers_of(model, privacy.contribution)
        norm_aggregation.refuse_impossible(layout, [layer.contribution for layer in found])
        self.recorder = hooks.Recorder(found, privacy.clipping, profile)
        self.mode = privacy.mode_in_force()
        self.found = Norms()
        self._waiting: list[Waiting] = []
        self._asks = privacy.independence == "ask"

    def ask(self, loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> None:
        """Once, before the first step: raise NotImplementedError where samples mix. All ranks call it together."""
        if self._asks:
            recorder = self.recorder
            with self.profile.part("independence"):
                independence.refuse_dependent(self.model, loss, recorder.layers, inputs, targets, recorder.paused)
            self._asks = False

    def begin(self) -> None:
        """A new step: reads the mode, forgets the norms of the last one."""
        self.mode = self.privacy.mode_in_force()
        self.found = Norms()
        self.forget()

    def forget(self) -> None:
        """Drop what a forward outside any step, or a step that raised, has left."""
        self._waiting = []
        self.recorder.forget()

    def backward(self, losses: Tensor, indices: Sequence[int], scale: float, *, sync: bool) -> None:
        """Add the gradient of scale * sum_i c_i L_i to what is reduced next; ``losses`` [b], b >= 0.

        ``indices`` are the global numbers of the samples. With ``sync`` a reduction follows.
        """
        if self.privacy.fuse_norms:
            self._fused(losses, indices, scale, sync=sync)
            return
        factors = self.clip_factors(losses, indices)
        if self.mode.passes == "two_pass":
            with self.profile.part("second backward"), self.recorder.paused():
                self.model.backward(losses, factors * scale, sync=sync)
        else:
            self._contract(self.recorder.take(), factors * scale, self.found.norms[-1], sync=sync)

    def clip_factors(self, losses: Tensor, indices: Sequence[int]) -> Tensor:
        """[b], or [G, b] with G clipping groups: first backward, norms, factors."""
        return self._factors(self._terms(losses), indices)

    def _terms(self, losses: Tensor) -> Terms:
        again = self.mode.passes == "two_pass"
        with self.profile.part("first backward"), self.model.gradients_of_outputs(again=again):
            terms = self.recorder.squared_norm_terms(losses, self.mode)
        self.notify("after_first_backward")
        return terms

    def _factors(self, terms: Terms, indices: Sequence[int]) -> Tensor:
        with self.profile.part("aggregation"):
            squared = norm_aggregation.squared_norms(terms, self.layout, self.model.axis)
        with self.profile.part("clip factors"):
            factors = self.privacy.clipping.factors(squared)
            self._report(squared, factors, indices)
        self.notify("after_norms")
        return factors

    def _contract(self, kept: Sequence[Use], weights: Tensor, norms: Tensor, *, sync: bool) -> None:
        """Clipped gradients from what bookkeeping kept; samples whose norm [b] is not finite are cut out if asked."""
        if self.privacy.nonfinite == "drop" and bool((bad := nonfinite_samples.found_in(norms)).any()):
            rows = (~bad).nonzero().flatten()
            kept, weights = [use.only(rows) for use in kept], weights[..., rows]
        with self.profile.part("weighted gradients"):
            gradients = partial(tied_parameters.weighted_gradients, kept, weights, self.privacy.clipping.group_of)
            self.model.add_gradients(gradients, sync=sync)

    def _fused(self, losses: Tensor, indices: Sequence[int], scale: float, *, sync: bool) -> None:
        """Put a micro-batch off; at the last one (``sync``) put all norms together, then weigh each micro-batch."""
        self._waiting.append(Waiting(self._terms(losses), self.recorder.take(), indices, scale))
        if not sync:
            return
        waiting, self._waiting = self._waiting, []
        every = [index for one in waiting for index in one.indices]
        factors = self._factors(norm_aggregation.joined([one.terms for one in waiting]), every)
        sizes = [len(one.indices) for one in waiting]
        parts = zip(waiting, torch.split(factors, sizes, -1), torch.split(self.found.norms[-1], sizes), strict=True)
        for one, own, norms in parts:
            self._contract(one.kept, own * one.scale, norms, sync=one is waiting[-1])

    def finish(self) -> None:
        """Raise NonFiniteNorm on all ranks if any rank met such a sample, unless they are to be left out."""
        if self.privacy.nonfinite == "raise":
            device = self.found.norms[0].device
            nonfinite_samples.refuse(self.found.nonfinite, device, self.model.axis, self.model.replicas)

    def add_noise(self, step: int, normaliser: float) -> None:
        """Noise on every reduced gradient element, once, after the last reduction.

        A parameter that no loss depends on is released too, with or without noise: that none does may depend on data.
        """
        for shard in self.model.shards():
            if shard.grad is None:
                shard.grad = torch.zeros_like(shard)
        if self.privacy.noise_multiplier == 0:
            return
        assert self.privacy.noise is not None
        self.privacy.noise.add_(self.model.pieces(), step, self.privacy.deviation(normaliser))

    def _report(self, squared: Tensor, factors: Tensor, indices: Sequence[int]) -> None:
        total = squared if squared.dim() == 1 else squared.sum(0)
        with self.profile.part("final"):
            norms = clip.norms(total)
        self.found.norms.append(norms)
        self.found.factors.append(factors)
        self.found.indices.extend(indices)
        if self.privacy.duplicates == "refuse" and len(set(self.found.indices)) < len(self.found.indices):
            twice = next(index for index in indices if self.found.indices.count(index) > 1)
            raise ValueError(
                f"sample {twice} occurs more than once in this step on this rank: it would move the sum by more than"
                " the clip norm; sample without duplicates, or say duplicates='count' and account for it"
            )
        bad = nonfinite_samples.found_in(norms).nonzero().flatten().tolist()
        self.found.nonfinite.extend(indices[row] for row in bad)
