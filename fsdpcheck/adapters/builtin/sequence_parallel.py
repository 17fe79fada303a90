"""PyTorch's sequence parallel: ``tensor_parallel`` whose ranks share out the positions between layers.

Norms and embeddings are replicated and see the rank's own positions. Every Linear sees all of them: by columns of its
weight or, after one by columns and if it has no bias, by rows. Inputs without positions are split on their features.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as styles

from fsdpcheck.adapters.builtin.tensor_parallel import TensorParallel

POSITIONS, WHOLE = Shard(1), Replicate()


def on_shards(function: Any, x: Tensor) -> Any:
    """An elementwise function of each rank's shard, for DTensor has no rule for the backward of hardtanh."""
    if not isinstance(x, DTensor):
        return function(x)
    return DTensor.from_local(function(x.to_local()), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


class SequenceParallel(TensorParallel):
    thaws = False

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> None:
        if not hasattr(model, "tail"):
            raise NotImplementedError("sequence_parallel knows of drawn models alone where positions begin and end")
        make, columns = partial(styles.parallelize_module, device_mesh=mesh), False
        for name, module in model.named_modules():
            if isinstance(module, nn.Hardtanh):
                cast(Any, module).forward = partial(on_shards, module.forward)
            elif isinstance(module, nn.Embedding | nn.LayerNorm | nn.RMSNorm):
                trained = {key: value.requires_grad for key, value in module.named_parameters()}
                make(module, parallelize_plan=styles.SequenceParallel())
                for key, value in module.named_parameters():
                    value.requires_grad_(self.thaws or trained[key])
            elif isinstance(module, nn.Linear) and name != "instrument":
                columns = (
                    not columns or module.bias is not None
                )  # each rank of n would add an n-th of the bias, rounded
                style = styles.ColwiseParallel if columns else styles.RowwiseParallel
                ends = {"input_layouts": POSITIONS} | ({} if columns else {"output_layouts": POSITIONS})
                make(module, parallelize_plan=style(**ends, use_local_output=False))
        parts = dict(model.named_children())
        make(parts["instrument"], parallelize_plan=styles.ColwiseParallel(output_layouts=WHOLE))
        enter = styles.PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=POSITIONS)
        leave = styles.PrepareModuleOutput(output_layouts=POSITIONS, desired_output_layouts=WHOLE)
        make(next(parts["units"].children(), parts["tail"]), parallelize_plan=enter)
        make(parts["tail"], parallelize_plan=leave)


adapter, thawing = SequenceParallel("sequence_parallel"), SequenceParallel("sequence_parallel, frozen norms thawed")
thawing.thaws = True
"""A known finding: SequenceParallel of torch 2.13 makes new parameters, which are trained, of frozen ones."""
