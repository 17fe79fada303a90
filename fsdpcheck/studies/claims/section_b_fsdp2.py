"""Section B, the API of FSDP2: every public method of its modules, of the reference and of ``fully_shard`` alone.

Four ranks, two replicas of two, so that each reduction there is takes place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fsdpcheck.studies.claims import toys
from fsdpcheck.studies.claims.lab import Lab, impl, message
from fsdpcheck.studies.claims.registry import REFUTED, Outcome, claim, only_if

WORLD_SIZE = 4
_NORMALISER = 8
_MODES = ("ghost", "ghost_bk")
Take = Callable[[], None]


class _Shown(NamedTuple):
    """What two steps with a call between them show, or why they failed: then the rest is empty.

    ``gathered``: parameters that are no shards after the last step. ``gathers``: all-gathers of rank 0.
    """

    failure: str = ""
    values: dict[str, Tensor] = {}  # noqa: RUF012 - never changed
    gathered: tuple[str, ...] = ()
    gathers: int = 0


@claim("B9", "The reference is compatible with the FSDP2 API.")
def fsdp2_api(lab: Lab) -> Outcome:
    """Each method is called between two steps, with what is not its default; the same on ``fully_shard`` alone.

    The reference clips at a bound above every norm, by two passes and by bookkeeping, so equal means equal in every bit
    of the parameters, gathered after the step what is gathered there, and as many more or fewer gathers.
    """
    methods = sorted(name for name in vars(FSDPModule) if not name.startswith("_"))
    calls = {name: _CALLS.get(name, operator.methodcaller(name)) for name in methods}
    bases = {mode: _shown(lab, partial(_private, mode)) for mode in _MODES}
    base = _shown(lab, _plain)
    if unlike := [mode for mode in _MODES if _difference(bases[mode], base, bases[mode], base)]:
        return Outcome(REFUTED, f"another step than fully_shard's, without any call between: {', '.join(unlike)}")
    alone = {name: _shown(lab, _plain, call) for name, call in calls.items()} | {"": base}
    apart: dict[str, list[str]] = {}
    for mode in _MODES:
        ours = {name: _shown(lab, partial(_private, mode), call) for name, call in calls.items()} | {"": bases[mode]}
        for name in methods:
            if difference := _difference(ours[name], alone[name], ours[""], alone[""]):
                apart.setdefault(name, []).append(f"{difference} ({mode})")
    fine = [name for name in methods if name not in apart]
    changing = [name for name in fine if _difference(alone[name], alone[""], alone[""], alone[""])]
    raising = [f"{name}: {alone[name].failure}" for name in fine if alone[name].failure]
    told = [f"{name}: {', '.join(differences)}" for name, differences in apart.items()]
    return Outcome(
        only_if(f"{', '.join(apart) or 'nothing'} is not called", under_it=True, otherwise=not apart),
        f"of {len(methods)} public methods of FSDPModule, called between two steps at W = {WORLD_SIZE} with other"
        f" values than their defaults, {len(fine)} do to a clipped step of the reference what they do to fully_shard"
        f" alone ({', '.join(fine)}), of which {len(changing)} change something ({', '.join(changing)}) and"
        f" {len(raising)} raise on both ({'; '.join(raising) or 'none'}); {len(apart)} do not:"
        f" {'; '.join(told) or 'none'}",
    )


def _difference(ours: _Shown, alone: _Shown, our_base: _Shown, their_base: _Shown) -> str:
    """What a call changed here and not there, in words; "" if nothing."""
    if ours.failure or alone.failure:
        return "" if ours.failure and alone.failure else f"raises {ours.failure}" if ours.failure else "raises nothing"
    if elements := toys.different(ours.values, alone.values):
        return f"{elements} elements of parameters differ"
    if ours.gathered != alone.gathered:
        return f"{len(ours.gathered)} parameters stay gathered instead of {len(alone.gathered)}"
    more, wanted = ours.gathers - our_base.gathers, alone.gathers - their_base.gathers
    return "" if (more > 0, more < 0) == (wanted > 0, wanted < 0) else f"{more:+} gathers instead of {wanted:+}"


def _shown(lab: Lab, build: Callable[[], tuple[Any, Take]], call: Callable[[Any], Any] = lambda root: None) -> _Shown:
    def body(rank: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        root, take = build()
        take()
        call(root)
        take()
        gathered = tuple(name for name, value in root.named_parameters() if not isinstance(value, DTensor))
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return {name: value.full_tensor().detach().clone() for name, value in root.named_parameters()}, gathered

    execution = lab.attempt(body, WORLD_SIZE)
    if execution.failure is not None:
        return _Shown(message(execution.failure))
    values, gathered = lab.returned[0]
    return _Shown("", values, gathered, sum("gather" in call.op for call in lab.trace()))


class _Doubled:
    """A collective of one's own whose result is doubled, which shows whether it is used."""

    def __init__(self, collective: Callable[..., Any]) -> None:
        self._collective = collective

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, *op: Any, **more: Any) -> Any:
        work = self._collective(output_tensor, input_tensor, *op, group=group, **more)
        if work is not None:
            work.wait()
        output_tensor.mul_(2)
        return work


_CALLS: dict[str, Callable[[Any], Any]] = {
    "set_all_reduce_hook": lambda root: root.set_all_reduce_hook(lambda tensor: tensor.mul_(2)),
    "set_allocate_memory_from_process_group_for_comm": (
        lambda root: root.set_allocate_memory_from_process_group_for_comm(True)
    ),
    "set_custom_all_gather": lambda root: root.set_custom_all_gather(
        _Doubled(impl("sharding.collectives")._all_gather)
    ),
    "set_custom_reduce_scatter": (
        lambda root: root.set_custom_reduce_scatter(_Doubled(impl("sharding.collectives")._reduce_scatter))
    ),
    "set_force_sum_reduction_for_comms": lambda root: root.set_force_sum_reduction_for_comms(True),
    "set_gradient_divide_factor": lambda root: root.set_gradient_divide_factor(2.0 * WORLD_SIZE),
    "set_is_last_backward": lambda root: root.set_is_last_backward(False),
    "set_modules_to_backward_prefetch": lambda root: root.set_modules_to_backward_prefetch([root[1]]),
    "set_modules_to_forward_prefetch": lambda root: root.set_modules_to_forward_prefetch([root[0]]),
    "set_post_optim_event": lambda root: root.set_post_optim_event(torch.Event()),
    "set_reduce_scatter_divide_factor": lambda root: root.set_reduce_scatter_divide_factor(2.0 * WORLD_SIZE),
    "set_reduce_scatter_max_input_buffers": lambda root: root.set_reduce_scatter_max_input_buffers(1),
    "set_reduce_scatter_unused_params": lambda root: root.set_reduce_scatter_unused_params(True),
    "set_requires_all_reduce": lambda root: root.set_requires_all_reduce(False),
    "set_requires_gradient_sync": lambda root: root.set_requires_gradient_sync(False),
    "set_reshard_after_backward": lambda root: root.set_reshard_after_backward(False),
    "set_reshard_after_forward": lambda root: root.set_reshard_after_forward(False),
    "set_unshard_in_backward": lambda root: root[0].set_unshard_in_backward(False),
}
"""How those are called that need an argument; others are called bare."""


def _private(mode: str) -> tuple[Any, Take]:
    """The reference on ``fully_shard``: (its root, a step that clips nothing)."""
    mesh = _mesh()
    model = impl("sharding.fsdp2_model").PerParameterModel(toys.network(), toys.UNITS, mesh, True)
    trainer = toys.trainer(model, privacy=toys.privacy(2.0**60, mode), normaliser=_NORMALISER)
    rows = [toys.share(torch.distributed.get_rank(), WORLD_SIZE)]
    return model.module, lambda: trainer.step(toys.micro_batches(rows))


def _plain() -> tuple[Any, Take]:
    """``fully_shard`` alone, the root kept after the forward as by the reference: (root, the same step)."""
    root: Any = toys.network()
    mesh = _mesh()
    for unit, reshard in ((root[0], True), (root[1], True), (root, False)):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    optimizer = toys.sgd(root.parameters())
    rows = toys.share(torch.distributed.get_rank(), WORLD_SIZE)
    x, y = toys.data()

    def take() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(toys.loss(root(x[rows]), y[rows]).sum() * (WORLD_SIZE / _NORMALISER))
        optimizer.step()

    return root, take


def _mesh() -> Any:
    return init_device_mesh("cpu", (WORLD_SIZE // 2, 2), mesh_dim_names=("replicate", "shard"))
