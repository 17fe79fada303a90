"""Changes of one attribute each, and what becomes of the row of the ledger that they are about."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdpcheck.findings.violation import Violation
from fsdpcheck.studies.claims.lab import impl
from fsdpcheck.studies.claims.registry import HOLDS, REFUTED


class Change(NamedTuple):
    """What turns a row: its verdict then, and an attribute of a module or ``module:class``, original -> changed."""

    id: str
    verdict: str
    place: str
    attribute: str
    changed: Callable[[Any], Any]


def _halves_the_padding(original: Any) -> Any:
    def pack(self: Any, pieces: Any) -> torch.Tensor:
        packed: torch.Tensor = original(self, pieces)
        packed[self.numel :] = 0.5
        return packed

    return pack


def _works_while_it_waits(original: Any) -> Any:
    def sum_over(partial_B: torch.Tensor, axis: Any) -> torch.Tensor:
        torch.ones(2, 2) @ torch.ones(2, 2)
        summed: torch.Tensor = original(partial_B, axis)
        return summed

    return sum_over


def _each_for_itself(original: Any) -> Any:
    """Norms of micro-batches are put together each at once, whatever was asked for."""
    return lambda *arguments, fuse_norms=False, **more: original(*arguments, **more)


def _counted_twice(original: Any) -> Any:
    """The right norm, by twice the operations."""

    def twice(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        original(a, g)
        found: torch.Tensor = original(a, g)
        return found

    return twice


def _an_ulp_more(original: Any) -> Any:
    def more(self: Any) -> torch.Tensor:
        found: torch.Tensor = original(self)
        return torch.nextafter(found, torch.full_like(found, torch.inf))

    return more


def _broken(execution: Any) -> None:
    raise Violation("broken", got="", wanted="", where="")


def _nothing(*_: Any) -> None: ...


_PEAKS = {"immediate": 100, "deferred": 110}
_COST, _FLAT = "fsdpcheck.studies.claims.section_a_cost", "fsdpcheck.impl.sharding.flat_buffer:FlatBuffer"

CHANGES = [
    Change("A4", REFUTED, "fsdpcheck.impl.clipping.batch_layout", "_fingerprint", lambda original: lambda inputs: 7),
    Change("A5", HOLDS, "fsdpcheck.studies.claims.section_a", "CLIP_NORM", lambda original: 2.0**60),
    Change("A6", REFUTED, "fsdpcheck.adapters.builtin.reference:ReferenceTrainer", "norms", _an_ulp_more),
    Change("A6", REFUTED, "fsdpcheck.adapters.builtin.reference:ReferenceTrainer", "factors", _an_ulp_more),
    Change(
        "A6",
        HOLDS,
        "fsdpcheck.studies.claims.section_a_one_rank",
        "_from_definition",
        lambda original: lambda execution: [0.0],
    ),
    Change("A9", REFUTED, "fsdpcheck.studies.claims.network", "ALPHA_SECONDS", lambda original: 4e-3),
    Change("A10", REFUTED, _COST, "_sent", lambda original: lambda squared, dtype: squared * 2),
    Change("A11", HOLDS, "fsdpcheck.studies.claims.toys", "privacy", _each_for_itself),
    Change("A11", REFUTED, "fsdpcheck.impl.clipping.norm_aggregation", "sum_over", _works_while_it_waits),
    Change("A12", HOLDS, "fsdpcheck.studies.claims.toys", "privacy", _each_for_itself),
    Change("B3", REFUTED, _FLAT, "real", lambda original: property(lambda self: self.shard_numel)),
    Change("B4", REFUTED, _FLAT, "pack", _halves_the_padding),
    Change(
        "B6", REFUTED, "fsdpcheck.studies.claims.section_b_memory", "_wide", lambda original: lambda hidden: original(5)
    ),
    Change("B7", REFUTED, _FLAT, "free", lambda original: lambda self: None),
    Change(
        "B7", REFUTED, "fsdpcheck.impl.sharding.flat_model:ShardedModel", "_free_unless_kept", lambda original: _nothing
    ),
    Change(
        "B7", REFUTED, "fsdpcheck.impl.sharding.flat_model:ShardedModel", "_after_backward", lambda original: _nothing
    ),
    Change(
        "B9",
        REFUTED,
        "fsdpcheck.impl.sharding.fsdp2_model:PerParameterModel",
        "reduce_gradients",
        lambda original: _nothing,
    ),
    Change(
        "B9",
        "holds only if set_requires_all_reduce, set_requires_gradient_sync, set_reshard_after_backward, unshard"
        " is not called",
        "fsdpcheck.studies.claims.section_b_fsdp2",
        "_MODES",
        lambda original: ("ghost",),
    ),
    Change("C1", REFUTED, "fsdpcheck.studies.claims.section_c", "_UNEVEN", lambda original: [[0], [1], [2]]),
    Change("C3", HOLDS, "fsdpcheck.studies.claims.section_c", "_bound", lambda original: lambda *sizes: 1.6),
    Change(
        "C4",
        REFUTED,
        "fsdpcheck.studies.claims.section_c",
        "_peak",
        lambda original: lambda lab, mode, timing: _PEAKS[timing],
    ),
    Change("E1", REFUTED, "fsdpcheck.impl.kernels.choice", "rule", lambda original: lambda T, d, p: "half_gram"),
    Change("E1", REFUTED, "fsdpcheck.impl.kernels.torch_norms", "half_gram_squared_norm", _counted_twice),
    Change("E1", REFUTED, "fsdpcheck.impl.norms.linear", "gram", lambda original: lambda a, g: original(a, g) + 1),
    Change(
        "E3",
        HOLDS,
        "fsdpcheck.impl.norms.linear",
        "gram",
        lambda original: lambda a, g: impl("norms.linear").direct(a.double(), g.double()).float(),
    ),
]

if importlib.util.find_spec("triton") is not None:
    CHANGES.append(
        Change("E1", REFUTED, "fsdpcheck.studies.claims.section_e", "assert_definition", lambda original: _broken)
    )

_D, _STEPS = "fsdpcheck.studies.claims.section_d", "fsdpcheck.studies.claims.section_d_steps"
_META = "fsdpcheck.studies.claims.section_d_meta"


def _other_rows(original: Any) -> Any:
    """Ranks get rows counted from a parameter's end."""

    def shard(module: Any, **more: Any) -> Any:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.flip(0)
        return original(module, **more)

    return shard


def _gathering(original: Any) -> Any:
    def state_dict(self: Any, *arguments: Any, **more: Any) -> Any:
        saved = original(self, *arguments, **more)
        for value in saved.values():
            value.full_tensor()
        return saved

    return state_dict


def _moments_lost(original: Any) -> Any:
    return lambda self: {**original(self), "state": {}}


def _kept_after_the_backward(original: Any) -> Any:
    def sharded(module: Any, **more: Any) -> Any:
        original(module, **more).set_reshard_after_backward(False)
        return module

    return sharded


def _leaks(original: Any) -> Any:
    """Storages are given back, but not before they are gathered the next time."""
    return lambda storage, size: None if size == 0 else original(storage, size)


def _each_layer_a_unit(original: Any) -> Any:
    def shard(module: Any, **more: Any) -> Any:
        for child in module.children():
            original(child, **more)
        return original(module, **more)

    return shard


def _materialised_first(original: Any) -> Any:
    return lambda module, **more: original(module.to_empty(device="cpu"), **more)


def _run_before(original: Any) -> Any:
    """A model that has memory has run a forward when it is handed out."""

    def sharded(module: Any, **more: Any) -> Any:
        original(module, **more)
        if not any(parameter.is_meta for parameter in module.parameters()):
            module(torch.ones(1, 3).double())
        return module

    return sharded


def _recomputing(original: Any) -> Any:
    """The first unit is computed again in its backward, hooks and all."""

    def sharded(module: Any, **more: Any) -> Any:
        module[0].forward = partial(checkpoint, module[0].forward, use_reentrant=False)
        return original(module, **more)

    return sharded


def _one_axis(original: Any) -> Any:
    return lambda device, shape, **names: original(device, (torch.Size(shape).numel(),))


def _breaks_every_graph(original: Any) -> Any:
    def compiled(module: Any, backend: Any) -> Any:
        return original(torch.compiler.disable(module), backend=backend)

    return compiled


CHANGES_OF_FSDP2 = [
    Change("D1", REFUTED, _D, "fully_shard", _other_rows),
    Change("D2", REFUTED, _D, "_frozen", lambda original: lambda frozen: original(False)),
    Change("D3", REFUTED, "torch.nn:Module", "state_dict", _gathering),
    Change("D3", REFUTED, "torch.optim:Optimizer", "state_dict", _moments_lost),
    Change("D4", REFUTED, _D, "Halved", lambda original: lambda tensor: tensor),
    Change("D5", REFUTED, _D, "sharded", _kept_after_the_backward),
    Change("D5", REFUTED, "torch:UntypedStorage", "resize_", _leaks),
    Change("D6", REFUTED, _D, "fully_shard", _each_layer_a_unit),
    Change("D7", REFUTED, _META, "sharded", _materialised_first),
    Change("D7", REFUTED, _META, "sharded", _run_before),
    Change("D7", REFUTED, _META, "_first_forward_of_meta", lambda original: lambda rank: ""),
    Change("D8", REFUTED, _D, "sharded", _recomputing),
    Change("D9", REFUTED, _STEPS, "sharded", lambda original: partial(original, reshard_after_forward=False)),
    Change(
        "D10",
        REFUTED,
        "torch.distributed.fsdp:FSDPModule",
        "set_requires_gradient_sync",
        lambda original: lambda self, sync, **more: None,
    ),
    Change("D11", REFUTED, _STEPS, "init_device_mesh", _one_axis),
    Change("D12", REFUTED, _STEPS, "sharded", lambda original: lambda module, **more: original(module)),
    Change("D13", REFUTED, "torch", "compile", _breaks_every_graph),
    Change("D14", HOLDS, "torch.nn.init", "normal_", lambda original: torch.nn.init.zeros_),
]
