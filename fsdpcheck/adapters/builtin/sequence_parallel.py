"""PyTorch's sequence parallel: ``tensor_parallel`` whose ranks share out the positions between layers.

Norms and embeddings are replicated and see the rank's own positions. Every Linear sees all of them: by columns of its
weight or, where one by columns gives it features, by rows. Inputs without positions are split on their features.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as styles

from fsdpcheck.adapters.builtin.tensor_parallel import TensorParallel

POSITIONS, WHOLE = Shard(1), Replicate()
LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)


def on_shards(function: Any, x: Tensor) -> Any:
    """An elementwise function of each rank's shard, for DTensor has no rule for the backward of hardtanh."""
    if not isinstance(x, DTensor):
        return function(x)
    return DTensor.from_local(function(x.to_local()), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


def by_rows(model: nn.Module) -> dict[str, str]:
    """Layers that are given the features of the one before, its columns, each with that one; both run once in a row.

    They have no bias, of which each rank of n would add an n-th, rounded.
    """
    found: dict[str, str] = {}
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LAYERS)]
    for (before, first), (name, second) in pairwise(layers):
        at = [model.get_submodule(each.rpartition(".")[0]) for each in (before, name)]
        once = all(isinstance(chain, nn.Sequential) and not getattr(chain, "used", ()) for chain in at)
        if before not in found and once and isinstance(first, nn.Linear) and isinstance(second, nn.Linear):
            found |= {name: before} if second.bias is None else {}
    return found


class SequenceParallel(TensorParallel):
    thaws = False

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> None:
        if not hasattr(model, "tail"):
            raise NotImplementedError("sequence_parallel knows of drawn models alone where positions begin and end")
        make, rows = partial(styles.parallelize_module, device_mesh=mesh), by_rows(model)
        for name, module in model.named_modules():
            if isinstance(module, nn.Hardtanh):
                cast(Any, module).forward = partial(on_shards, module.forward)
            elif isinstance(module, nn.Embedding | nn.LayerNorm | nn.RMSNorm):
                trained = {key: value.requires_grad for key, value in module.named_parameters()}
                make(module, parallelize_plan=styles.SequenceParallel())
                for key, value in module.named_parameters():
                    value.requires_grad_(self.thaws or trained[key])
            elif name in rows:
                make(module, parallelize_plan=styles.RowwiseParallel(output_layouts=POSITIONS, use_local_output=False))
            elif isinstance(module, nn.Linear) and name != "instrument":
                ends = {"input_layouts": POSITIONS, "output_layouts": Shard(-1) if name in rows.values() else WHOLE}
                make(module, parallelize_plan=styles.ColwiseParallel(**ends, use_local_output=False))
        parts = dict(model.named_children())
        make(parts["instrument"], parallelize_plan=styles.ColwiseParallel(output_layouts=WHOLE))
        enter = styles.PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=POSITIONS)
        leave = styles.PrepareModuleOutput(output_layouts=POSITIONS, desired_output_layouts=WHOLE)
        make(next(parts["units"].children(), parts["tail"]), parallelize_plan=enter)
        make(parts["tail"], parallelize_plan=leave)


adapter, thawing = SequenceParallel("sequence_parallel"), SequenceParallel("sequence_parallel, frozen norms thawed")
thawing.thaws = True
"""A known finding: SequenceParallel of torch 2.13 makes new parameters, which are trained, of frozen ones."""
