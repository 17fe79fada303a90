"""The least an adapter can be: plain data parallelism.

$ fsdpcheck run --adapter docs/examples/data_parallel.py:adapter
"""

import torch.distributed as dist

from fsdpcheck.adapter import Features


class Trainer:
    def __init__(self, model, setup):
        self.model, self.setup = model, setup
        self.optimizer = setup.optimizer(model.parameters())

    def step(self, batch):  # this rank's samples of one optimizer step
        self.optimizer.zero_grad()
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)  # one a sample
            (losses.sum() * batch.loss_scale).backward()  # such that the mean over ranks is the gradient
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.setup.world_size
        self.optimizer.step()

    def parameters(self):  # full values on every rank, copied
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


class DataParallel:
    name = "data_parallel"
    features = Features(promises=frozenset({"plain"}), accepts=frozenset({"bias", "ragged"}))

    def build(self, model, setup):
        return Trainer(model, setup)


adapter = DataParallel()
