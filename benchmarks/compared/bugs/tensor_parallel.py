"""Bugs of tensor parallelism."""

from __future__ import annotations

from typing import Final

from benchmarks.compared.planted import Bug

_IMPORT: Final = "from torch.distributed.tensor.parallel import ColwiseParallel"
_DOWN: Final = '"feed_forward.down": RowwiseParallel()'
_ALL: Final = (2, 3, 4)

BUGS: Final = (
    Bug(
        "partial_output_not_reduced", "tensor_parallel", "not reduced", "loss",
        "the output of the second linear layer stays a partial sum on each rank",
        ((_DOWN, '"feed_forward.down": RowwiseParallel(output_layouts=Partial())'),
         (_IMPORT, "from torch.distributed.tensor import Partial\n" + _IMPORT)), _ALL,
    ),
    Bug(
        "batches_by_rank", "tensor_parallel", "data", "data",
        "ranks of one tensor-parallel group draw different batches",
        (("manual_seed(args.seed + 1)", "manual_seed(args.seed + 1 + dist.get_rank())"),), _ALL,
    ),
    Bug(
        "replicated_layers_begin_apart", "tensor_parallel", "replicas differ", "parameter",
        "layers that are not parallelised begin with another value on each rank",
        (("    torch.manual_seed(args.seed)\n", "    torch.manual_seed(args.seed + dist.get_rank())\n"),), _ALL,
    ),
    Bug(
        "number_of_heads_not_divided", "tensor_parallel", "other", "loss",
        "each rank cuts its share of the columns into as many heads as one rank cuts all: heads are W times narrower",
        (("view(batch, length, -1, self.head_width)", "view(batch, length, 6, -1)"),), (2, 4),
        fails="at W = 3, 8 columns are not cut into 6 heads: RuntimeError of view",
    ),
    Bug(
        "gathered_between", "tensor_parallel", "none", "",
        "activations between the two linear layers are gathered, and split again",
        (('"feed_forward.up": ColwiseParallel()', '"feed_forward.up": ColwiseParallel(output_layouts=Replicate())'),
         (_DOWN, '"feed_forward.down": RowwiseParallel(input_layouts=Replicate())'),
         (_IMPORT, "from torch.distributed.tensor import Replicate\n" + _IMPORT)),
    ),
)  # fmt: skip
