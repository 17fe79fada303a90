"""What releases of torch have under other names, or not at all: tried with 2.13.0; 2.11.0 lacks it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.torch_version import TorchVersion

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

reads_dumps_of_gloo = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 13), reason="torch's analyser of dumps reads those of NCCL alone before 2.13"
)

resets_iterations = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="fully_shard has no way back from a step that raised before 2.13",
)
connects_stages_of_one_rank = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 13),
    reason="schedules in which a rank has neighbouring stages open a connection to itself, which gloo has none of, "
    "before 2.13: read in 2.11's source, pipelining/stage.py",
)


def with_a_way_back(ways: Iterable[str]) -> list[str]:
    """The ways to shard, by the names that tests have for them, that recover from a step that raised."""
    return [way for way in ways if way == "flat" or hasattr(FSDPModule, "reset_iter_state")]


def meet(store: dist.Store, name: str, ranks: int) -> None:
    """Wait until so many ranks have come here."""
    if hasattr(store, "barrier"):
        store.barrier(name, ranks)
        return
    store.add(name, 1)
    while store.add(name, 0) < ranks:
        pass
