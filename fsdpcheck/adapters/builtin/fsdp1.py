"""PyTorch FSDP1: ``FullyShardedDataParallel``, each unit one flat parameter; HYBRID_SHARD with replicas."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdpcheck.adapters.contract import ArithmeticRule, Features, GlobalNormRule, Setup, Trait
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop, mesh_of
from fsdpcheck.case import MeshSpec

_WRAPPER = "_fsdp_wrapped_module."


def _strategy(mesh: MeshSpec, hybrid_of_one: bool) -> ShardingStrategy:
    """Replicas that do not shard are NO_SHARD over all ranks, unless ``hybrid_of_one``."""
    if mesh.dp_replicate > 1 and mesh.dp_shard == 1 and not hybrid_of_one:
        return ShardingStrategy.NO_SHARD
    if mesh.dp_replicate > 1:
        hybrid = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
        return hybrid[0] if mesh.reshard_after_forward else hybrid[1]
    return ShardingStrategy.FULL_SHARD if mesh.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP


class _Loop(TrainingLoop):
    """An ordinary FSDP1 training loop.

    ``use_orig_params=True`` throughout: it is what PyTorch recommends, the only mode in which a unit may mix frozen and
    trainable parameters, and the one whose optimizer sees parameters (False lets the optimizer update padding too).
    """

    def __init__(self, model: FullyShardedDataParallel, setup: Setup, sync_every: bool, thaws: bool) -> None:
        super().__init__(model, setup)
        self._wrapped, self._sync_every, self._thaws = model, sync_every, thaws

    def thaw(self) -> None:
        """Refused where it would go wrong: on one shard, the first gradients of what is thawed are lost by no_sync."""
        step = self.setup.step
        if self.setup.mesh.dp_shard == 1 and step.micro_batches > 1 and not (step.sync_every or self._thaws):
            raise NotImplementedError("on one shard FSDP1 loses gradients of what is thawed that no_sync leaves")
        super().thaw()

    def reducing(self, number: int, last: int) -> AbstractContextManager[object]:
        return nullcontext() if self._sync_every or self.reduces(number, last) else self._wrapped.no_sync()

    def clip(self, limit: float) -> Tensor:
        return self._wrapped.clip_grad_norm_(limit).detach().clone()

    def parameters(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return {_canonical(name): value.detach().clone() for name, value in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor | None]:
        dtype = next(self.model.parameters()).dtype
        with (
            _default_dtype(dtype),
            FullyShardedDataParallel.summon_full_params(self.model, writeback=False, with_grads=True),
        ):
            trained = [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]
            return {_canonical(name): value.grad.detach().clone() for name, value in trained if value.grad is not None}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Around a gather of gradients: a rank whose shard has none sends ``torch.zeros`` of the *default* dtype.

    That is FlatParamHandle.unshard_grad in torch 2.13; other ranks send the parameters' dtype, and in a float64 model
    the all-gather is torn. A unit that mixes frozen and trainable parameters has such ranks.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _canonical(name: str) -> str:
    return name.replace(_WRAPPER, "")


def _refuse_tied_apart(model: nn.Module, setup: Setup) -> None:
    """Raise ValueError for a parameter of two units, or of a unit and the root."""
    unit_of = {f"{name}.": number for number, names in enumerate(setup.units) for name in names}
    seen: dict[int, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = next((number for prefix, number in unit_of.items() if name.startswith(prefix)), -1)
        if seen.setdefault(id(parameter), own) != own:
            raise ValueError(f"{name} is in two units: on one shard FSDP1 loses the gradient of one, in silence")


def _give_another_tensor(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook: a unit that left its layers out gives a view of its input, for FSDP1 puts hooks on both."""
    return output.view_as(output) if output is inputs[0] else None


def _precision(setup: Setup) -> MixedPrecision | None:
    """None, or the usual mixed precision: gradients reduced in float32."""
    if setup.compute_dtype is None:
        return None
    return MixedPrecision(param_dtype=setup.compute_dtype, reduce_dtype=torch.float32)


class FullyShardedDataParallelAdapter:
    """Units wrapped through a CustomPolicy, then the root. Tied layers must be in one unit (see fsdp.wrap)."""

    features = Features(
        promises=frozenset({"plain", "global-norm", "sharded", "memory", "copies", "thawing"}),
        accepts=ORDINARY - {"parameter-groups", "inference-mode"} | {"routed"},  # its pieces all have one dimension
        observables=frozenset({"params", "grads", "grad_norm"}),
        arithmetic=ArithmeticRule(unused="zero-in-used-unit"),
        global_norm=GlobalNormRule(nested=True, dtype="float32", eps=1e-6),
        reasons={
            **{promise: reason for promise, reason in PLAIN_REASONS.items() if promise != "copies"},
            "padding.zero": "fills its padding with 42 on purpose (_FLAT_PARAM_PADDING_VALUE), so that a leak is seen",
            "padding.unread": "has no public view of its padding",
            "epochs": "has torch's DistributedSampler, which is checked with fully_shard",
            "lifecycle": "gathers the next unit ahead, and has no public view of what is gathered",
            "hooks": "gives frozen modules beside trained ones a backward: hooks fire; fsdp1:hooked promises it",
            "parameter-hooks": "sets gradients of the views that the optimizer has by itself",
            "interrupts": "has no way back from a forward or backward that raised",
            "features": "the features are those of FSDP2",
            "features.broadcast": "its sync_module_states=True refuses parameters on the CPU, where this runs (2.13)",
        },
    )

    def __init__(
        self,
        name: str,
        *,
        hybrid_of_one: bool = False,
        unsynced: bool = False,
        hooked: bool = False,
        apart: bool = False,
        passed_on: bool = False,
        more: Trait | None = None,
        thaws: bool = False,
    ) -> None:
        self.name, self._hybrid_of_one, self._unsynced, self._apart = name, hybrid_of_one, unsynced, apart
        self._thaws, self._passed_on = thaws, passed_on
        if more is not None:
            self.features = replace(self.features, accepts=self.features.accepts | {more})
        if hooked:
            self.features = replace(self.features, promises=self.features.promises | {"hooks"})

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        if not self._apart:
            _refuse_tied_apart(model, setup)
        strategy = _strategy(setup.mesh, self._hybrid_of_one)
        hybrid = setup.mesh.dp_replicate > 1 and strategy is not ShardingStrategy.NO_SHARD
        reduces = setup.compute_dtype is not None and not self._unsynced
        units = {id(unit): unit for names in setup.units for unit in map(model.get_submodule, names)}
        for unit in () if self._passed_on else units.values():
            if not any(parameter.requires_grad for parameter in unit.parameters()):
                unit.register_forward_hook(_give_another_tensor)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"\s*.* has both parameters with requires_grad=True and False")
            wrapped = FullyShardedDataParallel(
                model,
                sharding_strategy=strategy,
                device_mesh=mesh_of(setup, "dp_shard") if hybrid else None,
                auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
                device_id=setup.device,
                use_orig_params=True,
                mixed_precision=_precision(setup),
            )
        return _Loop(wrapped, setup, reduces, self._thaws)


adapter = FullyShardedDataParallelAdapter("fsdp1")
hybrid_of_one = FullyShardedDataParallelAdapter("fsdp1, HYBRID_SHARD of one", hybrid_of_one=True)
"""A known finding: with one shard a replica a hybrid strategy becomes NO_SHARD *inside* the replica and never reduces
over replicas (_init_core_state and _reduce_grad_no_shard in torch 2.13; pytorch#154888)."""
hooked = FullyShardedDataParallelAdapter("fsdp1, with hooks", hooked=True)
"""A known finding: a frozen parameter in one unit with trained ones is a view of the one flat parameter, so its module
has a backward, and the user's backward hooks on it fire where a single device has none to fire."""
thawing = FullyShardedDataParallelAdapter("fsdp1, thawed on one shard", thaws=True)
"""A known finding: on one shard the first step behind a thaw loses the gradients of micro-batches under ``no_sync``, if
those before were under it too (torch 2.13). ``adapter`` refuses it."""
inferring = FullyShardedDataParallelAdapter("fsdp1, in inference mode", more="inference-mode")
"""A known finding: what a forward in ``torch.inference_mode`` gathers into is an inference tensor, and the next step of
training raises, unless ``summon_full_params`` was between (torch 2.13; pytorch#113203)."""
passed_on = FullyShardedDataParallelAdapter("fsdp1, frozen units that pass on their input", passed_on=True)
"""A known finding: a unit in which nothing is trained and that gives its input as it is, as where no sample of a
micro-batch needs its layers, raises in the backward (torch 2.13). Its hooks of before and behind are on one tensor."""
tied_apart = FullyShardedDataParallelAdapter("fsdp1, weights of two units", apart=True)
"""A known finding: on one shard a weight that two units share loses the gradient of one of them, torch 2.13; on several
the forward raises. ``adapter`` refuses it."""
unsynced = FullyShardedDataParallelAdapter("fsdp1, no_sync in mixed precision", unsynced=True)
"""Two known findings of ``no_sync`` in mixed precision, torch 2.13. Micro-batches are added up in bfloat16, which
fully_shard does in ``reduce_dtype``. With one shard it raises RuntimeError where parameters are tied: the gradient it
left in bfloat16 is given to the second name without the detour that the first takes
(FlatParamHandle._use_sharded_grad_views). ``adapter`` reduces after every micro-batch in mixed precision."""
