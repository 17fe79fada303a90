"""All that an author of an adapter needs: ``from fsdpcheck.adapter import Features, Setup, Batch``.

An adapter is one object that lets fsdpcheck build and step an implementation. In steps:

1. Write a class with ``name``, ``features`` and ``build(model, setup)``: see ``Adapter``. ``build`` shards the model as
   your code does, and returns a trainer. ``Setup`` has all that it may know besides the model.
2. Give the trainer ``step(batch)``, one whole optimizer step on this rank's samples, and ``parameters()``, the full
   values by name on every rank: see ``Trainer`` and ``Batch``.
3. Promise what you want to be held to, "plain" at first, and accept the traits of cases that your code takes: see
   ``Features``.
4. Run it: ``fsdpcheck run --adapter my_file.py:adapter``. Laws that are not promised are listed with their reason.
5. Promise more. A promise may need a method of ``Observed``, an announced ``Moment`` or a declared convention
   (``ArithmeticRule``, ``FactorRule``, ``GlobalNormRule``, ``NormRule``); the message says which one is missing.

The least that an adapter can be::

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

The words in sets, each a Literal whose members a typed editor offers::

    Promise      what an adapter can promise; each law asks for one
    Trait        what a case demands of an implementation; `fsdpcheck list traits` explains each
    Observable   what a trainer shows besides its parameters, by methods of Observed
    Moment       a point of a step that Setup.notify announces, so that laws look at it
    Use          a feature of FSDP2 that a training uses, in Setup.using
    Compute      what the model computes in: its parameters' dtype, bfloat16, or TF32
    Dtype        what parameters and gradients may have
    KernelDtype  what a kernel may take
    Unused       the gradient of a parameter that no sample depends on; see ArithmeticRule
    ORDINARY     traits that ask for nothing but torch's own layers, losses and optimizers
    PLAIN_REASONS  why who only trains plainly makes no other promise: for Features.reasons
    Kernel       a function from activations and backprops of a Linear to squared norms of samples
"""

from fsdpcheck.adapters.capabilities import Drawn, Engine, EngineSetup, Kernel, Kernels, Sampler, SamplerSetup, Sampling
from fsdpcheck.adapters.contract import (
    Adapter,
    ArithmeticRule,
    Batch,
    Compute,
    FactorRule,
    Features,
    GlobalNormRule,
    Keeping,
    MicroBatch,
    Moment,
    NormRule,
    Observable,
    Observed,
    Part,
    Promise,
    Setup,
    Shard,
    Snippets,
    Stored,
    Trainer,
    Trait,
    UnitState,
    Unused,
    Use,
)
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop, local, local_loss, mesh_of, whole
from fsdpcheck.case import Dtype, MeshSpec, StepSpec
from fsdpcheck.case.kernel import KernelDtype
from fsdpcheck.case.sampler import SamplingSpec, share_count, share_of

__all__ = [
    "ORDINARY",
    "PLAIN_REASONS",
    "Adapter",
    "ArithmeticRule",
    "Batch",
    "Compute",
    "Drawn",
    "Dtype",
    "Engine",
    "EngineSetup",
    "FactorRule",
    "Features",
    "GlobalNormRule",
    "Keeping",
    "Kernel",
    "KernelDtype",
    "Kernels",
    "MeshSpec",
    "MicroBatch",
    "Moment",
    "NormRule",
    "Observable",
    "Observed",
    "Part",
    "Promise",
    "Sampler",
    "SamplerSetup",
    "Sampling",
    "SamplingSpec",
    "Setup",
    "Shard",
    "Snippets",
    "StepSpec",
    "Stored",
    "Trainer",
    "TrainingLoop",
    "Trait",
    "UnitState",
    "Unused",
    "Use",
    "local",
    "local_loss",
    "mesh_of",
    "share_count",
    "share_of",
    "whole",
]
