"""The reference implementation's clipping engine over PyTorch's ``fully_shard``: parameters sharded one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from fsdpcheck.adapters.builtin._fsdp2_features import NO_WAY_BACK
from fsdpcheck.adapters.builtin.reference import Reference
from fsdpcheck.adapters.contract import ArithmeticRule, Setup
from fsdpcheck.adapters.training_loop import mesh_of

if TYPE_CHECKING:
    from fsdpcheck.impl.sharding.protocol import Sharded


_SHARED = "has those of the reference, which are checked there"


class ReferenceFsdp2(Reference):
    """Promises what the reference does, except what concerns padding, which FSDP2 hides, and what is no model's."""

    name = "reference_fsdp2"
    features = replace(
        Reference.features,
        promises=Reference.features.promises
        - {
            "padding.zero",
            "padding.unread",
            "lifecycle",
            "kernels",
            "epochs",
            "poisson",
            "same-draws",
            "engine",
            *NO_WAY_BACK,
        }
        | {"parameter-hooks", "features.prefetch", "features.no-gather", "features.ignored"},
        accepts=Reference.features.accepts - {"routed", "routed-private"} | {"parameter-groups"},
        observables=Reference.features.observables - {"shards", "units"},
        arithmetic=ArithmeticRule(unused="zero-if-private"),
        reasons={
            "bookkeeping": Reference.features.reasons["bookkeeping"],
            "padding.zero": "a DTensor hides the padding of its last shard; it has no public view of it",
            "padding.unread": "a DTensor hides the padding of its last shard; it has no public view of it",
            "features.meta": Reference.features.reasons["features.meta"],
            "features": "its own loop decides what is gathered and reduced when, and shards rows",
            "lifecycle": "fully_shard gathers the next unit ahead, and has no public view of what is gathered",
            **dict.fromkeys(("kernels", "epochs", "poisson", "same-draws", "engine"), _SHARED),
            **NO_WAY_BACK,
        },
    )

    def shard(self, model: nn.Module, setup: Setup) -> Sharded:
        """Each unit by ``fully_shard``, then the root."""
        from fsdpcheck.adapters.builtin import _fsdp2_features as _fsdp2
        from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel

        units = [name for names in setup.units for name in names]
        sharded = PerParameterModel(
            model,
            units,
            mesh_of(setup, "dp_shard"),
            setup.mesh.reshard_after_forward,
            compute_dtype=setup.compute_dtype,
            sync_module_states="broadcast" in setup.using,
            ignored=[_fsdp2.ignored(model)] if "ignored" in setup.using else [],
        )
        if setup.using:
            _fsdp2.set_up(model, setup)
        return sharded


adapter = ReferenceFsdp2()
bookkeeping = ReferenceFsdp2("ghost_bk")
"""One backward: clipped gradients from what it kept, reduced by the engine itself."""
flash = ReferenceFsdp2("flash")
"""Norms of Linear layers by kernels: interpreted or their twins in torch without a GPU."""
flash_bookkeeping = ReferenceFsdp2("flash_bk")
"""Both."""
