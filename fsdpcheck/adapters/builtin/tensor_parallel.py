"""PyTorch's tensor parallel, ``parallelize_module``; on a mesh with data ranks too, ``fully_shard`` over these.

Weights of Linear and Embedding layers are sharded by rows, everything else is replicated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from fsdpcheck.adapters.contract import Batch, Features, Setup, Trait
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop, mesh_of


class Replicated(ParallelStyle):
    """A module all of which every rank computes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(value, mesh, (Replicate(),), run_check=False) for value in inputs)

        return distribute_module(module, device_mesh, None, enter, lambda _, output, mesh: output.to_local())


def plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """How each module that has parameters of its own is made parallel."""
    found: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            by_rows = ColwiseParallel if isinstance(module, nn.Linear) else RowwiseParallel
            found[name] = by_rows(input_layouts=Replicate(), output_layouts=Replicate())
        elif next(module.parameters(recurse=False), None) is not None:
            found[name] = Replicated()
    return found


class Loop(TrainingLoop):
    """The ordinary loop, in which data ranks reduce gradients only where they are to be reduced.

    The optimizer is given reduced gradients. Of a gradient that is Partial and a parameter that is Replicate it would
    add ``weight_decay * parameter`` as one n-th a rank, rounded: on three ranks 15.75 becomes 15.749999999999998.
    """

    def accumulate(self, batch: Batch) -> None:
        super().accumulate(batch)
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(at.is_partial() for at in gradient.placements):
                parameter.grad = gradient.redistribute(placements=cast(DTensor, parameter).placements)


class TensorParallel:
    """``parallelize`` over ranks along tp, if there are several; ``fully_shard`` over those of dp_shard."""

    features = Features(
        promises=frozenset({"plain", "global-norm", "thawing"}),
        accepts=ORDINARY
        - {"tied", "conv", "bags", "own-layers", "bfloat16", "tf32", "real", "inference-mode"}  # as fully_shard
        - {"hsdp", "rows<ranks", "uneven-rows", "empty-rank"}
        | {"matrix-optimizer", "row-optimizer"},
        observables=frozenset({"params", "grads", "grad_norm"}),
        axes=frozenset({"dp_shard", "tp"}),
        reasons={**PLAIN_REASONS},
    )

    def __init__(self, name: str, *more: Trait) -> None:
        self.name = name
        self.features = replace(self.features, accepts=self.features.accepts | {*more})

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Make ``model`` parallel over ``mesh``, of one axis and several ranks, in place."""
        parallelize_module(model, mesh, plan(model))

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        mesh, sizes = mesh_of(setup), setup.mesh.sizes
        if "tp" in sizes:  # a mesh of one rank would refuse the bias of a Linear of width one
            self.parallelize(model, mesh["tp"])
        if "dp_shard" in sizes:
            units: list[Any] = [[model.get_submodule(name) for name in names] for names in setup.units]
            for modules in (*units, model):
                fully_shard(modules, mesh=mesh["dp_shard"], reshard_after_forward=setup.mesh.reshard_after_forward)
        return Loop(model, setup)


adapter = TensorParallel("tensor_parallel")
few_rows = TensorParallel("tensor_parallel, fewer rows than ranks", "rows<ranks", "uneven-rows")
"""A known finding: the gradient of a weight with fewer rows than ranks is Replicate and the weight Shard(0), and the
optimizer's update in place raises (ColwiseParallel in torch 2.13). An Embedding of four rows on three ranks, of which
the last has none, raises in its forward (RowwiseParallel)."""
empty_ranks = TensorParallel("tensor_parallel, ranks without samples", "empty-rank")
"""A known finding: a Linear on a DTensor [0, T, d] never returns where T d is no power of d: flattening it to [0, d],
``view_groups`` of torch 2.13 loops for ever."""
