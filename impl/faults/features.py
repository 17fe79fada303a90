"""Planted bugs of FSDP2's features, in ``fully_shard`` itself: what is asked for is dropped, or done wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ._fault import Fault, Function, Hit, Plant, fault

_DROPPED = "dropped without a word"
_fsdp2_fault = partial(fault, subject="fully_shard")


def _dropped(target: str, law: str) -> Callable[[Plant], Fault]:
    """What is asked for has no effect, and nobody says so."""
    return _fsdp2_fault(target, "a request that has no effect", law, cause=_DROPPED)


class _Done:
    """The handle of work that is done."""

    def wait(self) -> None:
        """Return at once."""


@_dropped("torch.distributed.fsdp:FSDPModule.unshard", "features.unshard")
def unshard_by_hand_dropped(original: Function, hit: Hit) -> Function:
    """Units asked for by hand are gathered when their turn comes, as ever."""

    def planted(self: Any, async_op: bool = False) -> _Done:
        hit()
        return _Done()

    return planted


@_fsdp2_fault(
    "torch.distributed.fsdp:FSDPModule.set_modules_to_backward_prefetch",
    "an order of collectives that depends on the rank, https://github.com/ROCm/pytorch/pull/3501",
    "features.prefetch",
    cause="rank 0 alone calls all_gather.* in another order",
)
def prefetched_in_another_order(original: Function, hit: Hit) -> Function:
    """Rank 0 gathers the units that it prefetches for the backward in the opposite order."""

    def planted(self: Any, modules: list[Any]) -> None:
        if dist.get_rank() == 0 and len(modules) > 1:
            hit()
            modules = modules[::-1]
        original(self, modules)

    return planted


@_fsdp2_fault(
    "torch.distributed.fsdp:FSDPModule.set_requires_gradient_sync",
    "a shard dropped in no_sync, https://github.com/pytorch/pytorch/pull/73535",
    "features.some-sync",
    cause="right without some-sync",
)
def reduced_gradient_dropped_without_sync(original: Function, hit: Hit) -> Function:
    """Gradients that are reduced already are dropped when a micro-batch is not to be reduced."""

    def planted(self: Any, requires_gradient_sync: bool, **more: Any) -> None:
        if not requires_gradient_sync:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    hit()
                    parameter.grad = None
        original(self, requires_gradient_sync, **more)

    return planted


@_fsdp2_fault(
    "torch.distributed.fsdp:FSDPModule.set_requires_all_reduce",
    "replicas that are not reduced again, https://github.com/pytorch/pytorch/issues/154888",
    "features.late-all-reduce",
    cause="right without late-all-reduce",
)
def all_reduce_never_on_again(original: Function, hit: Hit) -> Function:
    """Once the all-reduce over replicas is off, it stays off."""

    def planted(self: Any, requires_all_reduce: bool, **more: Any) -> None:
        if requires_all_reduce:
            hit()
        original(self, False, **more)

    return planted


@_fsdp2_fault(
    "torch.distributed.fsdp:FSDPModule.set_gradient_divide_factor",
    "post factor 1 / pre, https://github.com/facebookresearch/fairscale/pull/565",
    "features.divide-factor",
    cause="right without divide-factor",
)
def divide_factor_inverted(original: Function, hit: Hit) -> Function:
    """Gradients are multiplied by the divide factor."""

    def planted(self: Any, factor: float) -> None:
        hit()
        original(self, 1 / factor)

    return planted


@_dropped("torch.distributed.fsdp:FSDPModule.set_unshard_in_backward", "features.no-gather")
def gathered_for_the_backward_anyway(original: Function, hit: Hit) -> Function:
    """Units are gathered for a backward that needs no weight, too."""

    def planted(self: Any, unshard_in_backward: bool) -> None:
        hit()

    return planted


@_fsdp2_fault(
    "torch.utils.checkpoint:checkpoint",
    "a recomputation on memory that was freed, https://github.com/pytorch/pytorch/issues/82203",
    "features.checkpointing",
    cause="right without checkpointing",
)
def recomputed_from_zeros(original: Function, hit: Hit) -> Function:
    """The forward that is computed again in the backward sees zeros."""

    def planted(function: Function, *inputs: torch.Tensor, **options: Any) -> Any:
        ran: list[bool] = []

        def forward(*again: torch.Tensor) -> Any:
            if ran:
                hit()
                again = tuple(value - value.detach() for value in again)
            ran.append(True)
            return function(*again)

        return original(forward, *inputs, **options)

    return planted


@_fsdp2_fault(
    "torch.distributed.tensor:distribute_tensor",
    "a model that is filled wrong after meta init, https://github.com/pytorch/torchtitan/issues/166",
    "features.meta",
    cause="right without meta",
)
def filled_in_reverse(original: Function, hit: Hit) -> Function:
    """Whole values are dealt out to shards from the last row on."""

    def planted(value: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        hit()
        return original(value.flip(0), *arguments, **more)

    return planted


@fault(
    "sharding.initial_sync:sync_parameters",
    "models that are never made equal, https://github.com/pytorch/torchtitan/issues/166",
    "features.broadcast",
    cause="and only the rest is broadcast from rank 0",
)
def only_the_root_is_broadcast(original: Function, hit: Hit) -> Function:
    """Initial values of the root unit are broadcast, those of inner units are not."""

    def planted(unit_name: str, *arguments: Any) -> None:
        if unit_name:
            hit()
        else:
            original(unit_name, *arguments)

    return planted


@fault(
    "sharding.collectives:broadcast",
    "weights that rank 0 has read, overwritten by another's, https://github.com/pytorch/torchtitan/issues/166",
    "features.broadcast",
    cause="all ranks start from what rank .* has built",
)
def broadcast_from_the_last_rank(original: Function, hit: Hit) -> Function:
    """Initial values are those of the last rank of each axis: all are equal, and none is rank 0's."""

    def planted(unit: Any, values: torch.Tensor, axis: Any) -> None:
        if axis.size > 1:
            hit()
            dist.broadcast(values, group=axis.group, group_src=axis.size - 1)

    return planted


@fault(
    "sharding.initial_sync:sync_buffers",
    "buffers that reach one module alone, https://github.com/huggingface/accelerate/pull/3921",
    "features.broadcast",
    cause="saved_gain: each rank keeps the buffer",
)
def only_buffers_of_the_root_are_broadcast(original: Function, hit: Hit) -> Function:
    """Buffers of the module itself are broadcast, those of the modules inside it are not."""

    def planted(module: torch.nn.Module, *arguments: Any) -> None:
        alone = torch.nn.Module()
        for name, buffer in module.named_buffers(recurse=False):
            alone.register_buffer(name, buffer)
        if len([*module.buffers()]) > len([*alone.buffers()]):
            hit()
        original(alone, *arguments)

    return planted


@fault(
    "sharding.initial_sync:sync_buffers",
    "buffers that no state dict has, https://github.com/EvolvingLMMs-Lab/lmms-engine/pull/185",
    "features.broadcast-buffers",
    cause="unsaved_gain.*: each rank keeps the buffer",
)
def buffers_broadcast_from_a_state_dict(original: Function, hit: Hit) -> Function:
    """Of the buffers those are broadcast that the state dict has."""

    def planted(module: torch.nn.Module, *arguments: Any) -> None:
        saved, found = module.state_dict(), torch.nn.Module()
        for name, buffer in module.named_buffers():
            if name in saved:
                found.register_buffer(name.replace(".", "_"), buffer)
            else:
                hit()
        original(found, *arguments)

    return planted


@_fsdp2_fault(
    "torch.distributed.checkpoint.state_dict:set_model_state_dict",
    "values missing from a state dict, https://github.com/areal-project/AReaL/pull/1468",
    "features.state-dict",
    cause="right without state-dict",
)
def last_entry_not_loaded(original: Function, hit: Hit) -> Function:
    """The last parameter of a state dict is left out, and nobody says so."""

    def planted(model: Any, state: dict[str, Any], *, options: Any) -> Any:
        hit()
        fewer = dict(list(state.items())[:-1])
        return original(model, fewer, options=dataclasses.replace(options, strict=False))

    return planted


def _without(original: Function, hit: Hit, option: str, instead: Any) -> Function:
    """``fully_shard`` that takes one option for another value."""

    def planted(module: Any, **options: Any) -> Any:
        if option in options:
            hit()
            options[option] = instead
        return original(module, **options)

    return planted


@_dropped("torch.distributed.fsdp:fully_shard", "features.ignored")
def ignored_parameter_sharded(original: Function, hit: Hit) -> Function:
    """A parameter that is to be left alone is sharded and reduced like the others."""
    return _without(original, hit, "ignored_params", None)


@_dropped("torch.distributed.fsdp:fully_shard", "features.columns")
def sharded_by_rows_anyway(original: Function, hit: Hit) -> Function:
    """Parameters are sharded on their first dimension whatever the placement function says."""
    return _without(original, hit, "shard_placement_fn", None)


@_fsdp2_fault(
    "torch:compile", "a sharded model that is not compiled at all, claim D13", "features.compiled", cause=_DROPPED
)
def nothing_compiled(original: Function, hit: Hit) -> Function:
    """What is to be compiled runs as it is."""

    def planted(function: Function, **options: Any) -> Function:
        hit()
        return function

    return planted


@fault(
    "torch:compile",
    "gradients that changed when the forward was traced, https://github.com/pytorch/pytorch/issues/184113",
    "features.private-compiled",
    cause="right without compiled",
)
def gradient_doubled_by_compilation(original: Function, hit: Hit) -> Function:
    """What is compiled gives the right outputs, and gradients of twice their size."""

    def planted(function: Function, **options: Any) -> Function:
        compiled = original(function, **options)

        def doubled(*inputs: Any, **named: Any) -> Any:
            hit()
            outputs = compiled(*inputs, **named)
            return outputs + (outputs - outputs.detach())

        return doubled

    return planted


@_fsdp2_fault(
    "torch.distributed.fsdp:fully_shard",
    "modules of one unit that are sharded apart",
    "features.bare-root",
    cause="right without bare-root",
)
def first_module_of_a_group_alone(original: Function, hit: Hit) -> Function:
    """Of several modules that are to be one unit only the first is; the others are left to the root."""

    def planted(module: Any, **options: Any) -> Any:
        if isinstance(module, list) and len(module) > 1:
            hit()
            options["ignored_params"] = {value for other in module[1:] for value in other.parameters()}
        return original(module, **options)

    return planted


@_dropped("torch.distributed.fsdp:fully_shard", "features.groups-of-two")
def freed_over_all_ranks(original: Function, hit: Hit) -> Function:
    """After the forward parameters are sharded over all ranks, not over pairs."""

    def planted(module: Any, *, reshard_after_forward: Any, **options: Any) -> Any:
        if not isinstance(reshard_after_forward, bool):
            hit()
            reshard_after_forward = True
        return original(module, reshard_after_forward=reshard_after_forward, **options)

    return planted
