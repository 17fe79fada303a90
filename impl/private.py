"""Private backward: the clipped gradients of one micro-batch, in any mode.

    losses [b] --first backward--> terms --aggregate--> squared norms --clipping--> factors
    factors --second backward, or contraction of what was kept--> local gradients of sum_i c_i L_i

No per-sample weight gradient is kept, and with complete contributions the norms cost no communication.

Source: Li et al. 2021, arXiv:2110.05679 (two passes); Bu et al. 2022, arXiv:2210.00038 (bookkeeping).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from . import aggregate, clip, hooks, layers, modes, nonfinite
from .aggregate import Layout
from .clipping import Clipping
from .modes import Mode
from .profile import OFF, Off, Profile
from .sharded import Sharded


@dataclass(frozen=True)
class Privacy:
    """How a sample's contribution is bounded.

    ``contribution`` is "complete", "partial" or "mixed" and needs a replicated batch unless complete. ``mode`` may be
    overridden for a step: see modes.py. ``nonfinite``: see nonfinite.py.
    """

    clipping: Clipping
    mode: Mode = modes.DEFAULT
    contribution: Literal["complete", "partial", "mixed"] = "complete"
    nonfinite: Literal["raise", "drop"] = "raise"

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
        return mode


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
        aggregate.refuse_impossible(layout, [layer.contribution for layer in found])
        self.recorder = hooks.Recorder(found, privacy.clipping, profile)
        self.mode = privacy.mode_in_force()
        self.found = Norms()

    def begin(self) -> None:
        """A new step: reads the mode, forgets norms and whatever a forward outside any step has left."""
        self.mode = self.privacy.mode_in_force()
        self.found = Norms()
        self.recorder.forget()

    def backward(self, losses: Tensor, indices: Sequence[int], scale: float, *, sync: bool) -> None:
        """Add the gradient of scale * sum_i c_i L_i to what is reduced next; ``losses`` [b], b >= 0.

        ``indices`` are the global numbers of the samples. With ``sync`` a reduction follows.
        """
        factors = self.clip_factors(losses, indices)
        with self.profile.part("second backward" if self.mode.passes == "two_pass" else "weighted gradients"):
            if self.mode.passes == "two_pass":
                self.model.backward(losses, factors * scale, sync=sync)
            else:
                self.model.add_gradients(self.recorder.weighted_gradients(factors * scale, self._rows()))

    def clip_factors(self, losses: Tensor, indices: Sequence[int]) -> Tensor:
        """[b], or [G, b] with G clipping groups: first backward, norms, factors."""
        again = self.mode.passes == "two_pass"
        with self.profile.part("first backward"), self.model.gradients_of_outputs(again=again):
            terms = self.recorder.squared_norm_terms(losses, self.mode)
        self.notify("after_first_backward")
        with self.profile.part("aggregation"):
            squared = aggregate.squared_norms(terms, self.layout, self.model.axis)
        with self.profile.part("clip factors"):
            factors = self.privacy.clipping.factors(squared)
            self._report(squared, factors, indices)
        self.notify("after_norms")
        return factors

    def finish(self) -> None:
        """Raise NonFiniteNorm on all ranks if any rank met such a sample, unless they are to be left out."""
        if self.privacy.nonfinite == "raise":
            device = self.found.norms[0].device
            nonfinite.refuse(self.found.nonfinite, device, self.model.axis, self.model.replicas)

    def _report(self, squared: Tensor, factors: Tensor, indices: Sequence[int]) -> None:
        total = squared if squared.dim() == 1 else squared.sum(0)
        self.found.norms.append(clip.norms(total))
        self.found.factors.append(factors)
        self.found.indices.extend(indices)
        bad = nonfinite.found_in(squared).nonzero().flatten().tolist()
        self.found.nonfinite.extend(indices[row] for row in bad)

    def _rows(self) -> Tensor | None:
        """Numbers of the samples that count, or None if all do."""
        if self.privacy.nonfinite != "drop":
            return None
        finite = torch.isfinite(self.found.norms[-1])
        return None if bool(finite.all()) else finite.nonzero().flatten()
