"""What releases of torch have under other names, or not at all: tried with 2.13.0; 2.11.0 lacks it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

reads_dumps_of_gloo = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 13), reason="torch's analyser of dumps reads those of NCCL alone before 2.13"
)


def meet(store: dist.Store, name: str, ranks: int) -> None:
    """Wait until so many ranks have come here."""
    if hasattr(store, "barrier"):
        store.barrier(name, ranks)
        return
    store.add(name, 1)
    while store.add(name, 0) < ranks:
        pass
