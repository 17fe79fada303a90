"""ZeRO-1 as torch has it: DistributedDataParallel, and ``ZeroRedundancyOptimizer``, which shares out the update.

Each parameter is updated by one rank, which then broadcasts it.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdpcheck.adapters.builtin import ddp
from fsdpcheck.adapters.contract import Setup
from fsdpcheck.adapters.training_loop import TrainingLoop

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the package scripts functions when it is imported
    from torch.distributed.optim import ZeroRedundancyOptimizer


class ZeroRedundancy(ddp.DistributedDataParallelAdapter):
    features = replace(  # the case's optimizer sorts parameters into groups, and is given groups of parameters here
        ddp.DistributedDataParallelAdapter.features,
        accepts=ddp.DistributedDataParallelAdapter.features.accepts - {"parameter-groups"},
    )

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = ZeroRedundancyOptimizer(trained, optimizer_class=cast(Any, setup.optimizer))
        return TrainingLoop(DistributedDataParallel(model), setup, named=model, optimizer=optimizer)


adapter = ZeroRedundancy("zero_redundancy")
