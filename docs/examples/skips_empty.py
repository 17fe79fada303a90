"""data_parallel.py with a bug: a rank that got no samples skips the collectives that the others wait in.

$ fsdpcheck run --adapter docs/examples/skips_empty.py:adapter --law training.plain
"""

import torch.distributed as dist

from fsdpcheck.adapter import Features


class Trainer:
    def __init__(self, model, setup):
        self.model, self.setup = model, setup
        self.optimizer = setup.optimizer(model.parameters())

    def step(self, batch):
        self.optimizer.zero_grad()
        for micro in batch.micro_batches:
            if len(micro.indices) == 0:
                continue
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            (losses.sum() * batch.loss_scale).backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.setup.world_size
        self.optimizer.step()

    def parameters(self):
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


class SkipsEmpty:
    name = "skips_empty"
    features = Features(promises=frozenset({"plain"}), accepts=frozenset({"bias", "ragged", "empty-rank"}))

    def build(self, model, setup):
        return Trainer(model, setup)


adapter = SkipsEmpty()
