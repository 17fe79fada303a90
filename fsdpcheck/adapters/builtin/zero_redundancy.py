"""ZeRO-1 as torch has it: DistributedDataParallel, and ``ZeroRedundancyOptimizer``, which shares out the update.

Each parameter is updated by one rank, which then broadcasts it.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from fsdpcheck.adapters.builtin import ddp
from fsdpcheck.adapters.contract import Setup
from fsdpcheck.adapters.training_loop import TrainingLoop


class ZeroRedundancy(ddp.DistributedDataParallelAdapter):
    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = ZeroRedundancyOptimizer(trained, optimizer_class=cast(Any, setup.optimizer))
        return ddp.Loop(DistributedDataParallel(model), setup, named=model, optimizer=optimizer)


adapter = ZeroRedundancy("zero_redundancy")
