"""How a training uses the features of ``fully_shard`` that ``Setup.using`` names, in public calls only.

``prepare`` goes before sharding and suits any way to shard; ``shard`` is ``fully_shard`` with what the features ask of
it; ``Uses`` stands around micro-batches and steps, and ``Loop`` is a loop with it. Source:
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.distributed.tensor as tensors
import torch.utils.checkpoint
from torch import Tensor, nn

from fsdpcheck.adapters.contract import Batch, MicroBatch, Promise, Setup
from fsdpcheck.adapters.training_loop import TrainingLoop, mesh_of

_HAS_A_WAY_BACK = hasattr(fsdp.FSDPModule, "reset_iter_state")
WAY_BACK: frozenset[Promise] = frozenset({"interrupts"} if _HAS_A_WAY_BACK else ())
"""What is promised where ``reset_iter_state`` is found: since torch 2.13."""
NO_WAY_BACK: dict[str, str] = (
    {} if _HAS_A_WAY_BACK else {"interrupts": "has no way back from a step that raised, before torch 2.13"}
)
PAIRS = 2
"""Ranks over which "groups-of-two" shards after the forward."""


def prepare(model: nn.Module, setup: Setup) -> None:
    """Units that compute their forward again in the backward, or compiled ones."""
    for unit in units(model, setup):
        if "checkpointing" in setup.using:
            unit.forward = _computed_again(unit.forward)
        if "compiled" in setup.using:
            unit.forward = setup.compile(unit.forward)


def units(model: nn.Module, setup: Setup) -> list[nn.Module]:
    """The modules that are inner units, in forward order; the model itself if there are none."""
    return [model.get_submodule(name) for names in setup.units for name in names] or [model]


def _computed_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any, **named: Any) -> Any:
        again = partial(forward, **named)  # checkpoint has keywords of its own
        return torch.utils.checkpoint.checkpoint(again, *inputs, use_reentrant=False)

    return run


def shard(model: nn.Module, setup: Setup, by_the_book: bool = False) -> Uses:
    """``fully_shard`` on each unit, then on the root. ``by_the_book``: recover from exceptions as documented."""
    prepare(model, setup)
    left_out = model.get_parameter(ignored(model)) if "ignored" in setup.using else None
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    built = {name: value.clone() for name, value in model.state_dict().items()} if "broadcast" in setup.using else {}
    if "meta" in setup.using:
        model.to("meta")
    options = _options(setup, left_out)
    for names in setup.units:
        modules = [model.get_submodule(name) for name in names]
        fsdp.fully_shard(modules if len(modules) > 1 else modules[0], **options)
    if "bare-root" in setup.using and (rest := _rest(model, setup)):
        fsdp.fully_shard(cast(Any, rest), **options)
    fsdp.fully_shard(model, **options)
    if "meta" in setup.using:
        model.to_empty(device=setup.device)
        _fill(model, values)
    if "broadcast" in setup.using:
        _load_from_rank_0(model, built)
    return Uses(model, setup, left_out, by_the_book)


def _options(setup: Setup, ignored: nn.Parameter | None) -> dict[str, Any]:
    mesh = mesh_of(setup, "dp_shard")
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": setup.mesh.reshard_after_forward}
    if ignored is not None:
        options["ignored_params"] = {ignored}
    if "columns" in setup.using:
        options["shard_placement_fn"] = partial(_by_columns, mesh["dp_shard"].size())
    if "groups-of-two" in setup.using:
        options["reshard_after_forward"] = PAIRS
    if setup.compute_dtype is not None:
        options["mp_policy"] = policy(setup.compute_dtype)
    return options


def policy(compute: torch.dtype) -> fsdp.MixedPrecisionPolicy:
    """The usual mixed precision: gradients reduced in float32 (the loss casts outputs itself)."""
    return fsdp.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def _by_columns(ranks: int, parameter: nn.Parameter) -> tensors.Shard | None:
    """FSDP2 asks for even shards on any dimension but the first."""
    return tensors.Shard(1) if parameter.dim() > 1 and parameter.shape[1] % ranks == 0 else None


def ignored(model: nn.Module) -> str:
    """The name of the parameter that "ignored" leaves out of sharding: the first that is trained."""
    return next(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def _rest(model: nn.Module, setup: Setup) -> list[nn.Module]:
    """Modules with parameters of their own that are in no unit."""
    inside = {id(module) for names in setup.units for name in names for module in model.get_submodule(name).modules()}
    owners = (module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    return [module for module in owners if id(module) not in inside]


@torch.no_grad()
def _fill(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, tensors.DTensor)
        parameter.copy_(tensors.distribute_tensor(values[name], parameter.device_mesh, parameter.placements))


def _load_from_rank_0(model: nn.Module, whole: dict[str, Any]) -> None:
    """Load a sharded model from a whole state dict, of which only rank 0's is read."""
    import torch.distributed.checkpoint.state_dict as state  # takes as long as a hundred small cases

    options = state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given: dict[str, Any] = whole if dist.get_rank() == 0 else {}
    state.set_model_state_dict(model, given, options=options)


def set_up(model: nn.Module, setup: Setup) -> None:
    """What is set once on a model that ``fully_shard`` has sharded."""
    inner: list[Any] = units(model, setup)
    if "divide-factor" in setup.using:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_gradient_divide_factor(2.0 * setup.world_size)
    if "prefetch" in setup.using:
        for place, unit in enumerate(inner):
            unit.set_modules_to_forward_prefetch(inner[place + 1 : place + 3])
            unit.set_modules_to_backward_prefetch(inner[max(place - 2, 0) : place][::-1])
    if "no-gather" in setup.using:
        for unit in inner:
            if all(isinstance(module, nn.Embedding) for module in unit.children()):
                unit.set_unshard_in_backward(False)


def _forget_unreduced(unit: Any) -> None:
    """Drop whole gradients at the unit's next forward; FSDP2 has gathered it when hooks of others run."""

    def forget(module: nn.Module, inputs: Any) -> None:
        hook.remove()
        for parameter in module.parameters():
            if not isinstance(parameter, tensors.DTensor):
                parameter.grad = None

    hook = unit.register_forward_pre_hook(forget)


class Uses:
    """What a training loop does for its features, micro-batch by micro-batch. ``model`` is sharded."""

    def __init__(
        self, model: nn.Module, setup: Setup, ignored: nn.Parameter | None = None, by_the_book: bool = False
    ) -> None:
        assert isinstance(model, fsdp.FSDPModule)
        self._by_the_book = by_the_book
        self._root: Any = model
        self._using, self._setup, self._ignored = setup.using, setup, ignored
        self._units: list[Any] = units(model, setup)
        self.loss_factor = 2.0 if "divide-factor" in setup.using else 1.0
        """By what the losses are multiplied."""
        set_up(model, setup)

    def before_forward(self, number: int, last: int) -> None:
        """Before micro-batch ``number`` of 0 .. ``last``: what its backward reduces, and what is gathered for it."""
        some = "some-sync" in self._using and number == 0
        self._root.set_requires_gradient_sync(self._setup.step.sync_every or number == last or some)
        if "late-all-reduce" in self._using:
            self._root.set_requires_all_reduce(number == last)
        if "unshard" in self._using:
            for handle in [module.unshard(async_op=True) for module in (self._root, *self._units)]:
                handle.wait()

    def after_backwards(self) -> None:
        """Average the gradient of what is not sharded, which is its user's to do."""
        if self._ignored is not None and self._ignored.grad is not None:
            dist.all_reduce(self._ignored.grad)
            self._ignored.grad /= self._setup.world_size

    def recover(self) -> None:
        """After a forward or backward that raised: as ``reset_iter_state`` documents, and what it leaves out.

        It keeps gradients of micro-batches that were not reduced, which only the next forward shows.
        """
        if not _HAS_A_WAY_BACK:
            return
        self._root.reset_iter_state()
        if not self._by_the_book:
            for module in self._root.modules():
                if isinstance(module, fsdp.FSDPModule):
                    _forget_unreduced(module)

    def after_step(self) -> None:
        """Take the parameters out, spoil them, and bring them back."""
        if "state-dict" not in self._using:
            return
        import torch.distributed.checkpoint.state_dict as state  # as above

        whole: Any = state.get_model_state_dict(self._root, options=state.StateDictOptions(full_state_dict=True))
        saved = {name: value.clone() for name, value in whole.items()}  # of one shard it is the shard itself
        with torch.no_grad():
            for parameter in self._root.parameters():
                parameter.fill_(float("nan"))
        _load_from_rank_0(self._root, saved)


class Loop(TrainingLoop):
    """The ordinary loop, with what features ask of it around micro-batches and steps."""

    def __init__(self, model: nn.Module, setup: Setup, uses: Uses, as_it_lies: bool) -> None:
        super().__init__(model, setup)
        self._uses, self._as_it_lies = uses, as_it_lies

    def thaw(self) -> None:
        if self._as_it_lies:
            self.model.requires_grad_()
        else:
            super().thaw()

    def step(self, batch: Batch) -> None:
        super().step(batch)
        self._uses.after_step()

    def accumulate(self, batch: Batch) -> None:
        try:
            super().accumulate(batch)
        except BaseException:
            self._uses.recover()
            raise
        self._uses.after_backwards()

    def reducing(self, number: int, last: int) -> AbstractContextManager[object]:
        self._uses.before_forward(number, last)
        return nullcontext()

    def loss(self, micro: MicroBatch, batch: Batch) -> Tensor:
        return super().loss(micro, batch) * self._uses.loss_factor
