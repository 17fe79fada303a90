"""Planted bugs of what happens in few trainings: evaluations, layers left out or run again, models built before."""

from __future__ import annotations

from typing import Any

import torch

from ._fault import Function, Hit, fault


@fault(
    "sharding.flat_buffer:FlatBuffer.allocate",
    "an evaluation that does not see the newest weights, https://github.com/pytorch/pytorch/issues/113203",
    "training.evaluation",
)
def evaluation_gathers_nothing(original: Function, hit: Hit) -> Function:
    """Without gradients the memory of gathered parameters is given back with zeros in it, and nothing comes after."""

    def planted(self: Any) -> Any:
        full = original(self)
        if torch.is_grad_enabled() or self.axis.size == 1:
            return full
        hit()
        self.full.zero_()
        return torch.empty_like(full)

    return planted


@fault(
    "trainer:Trainer.evaluate",
    "an evaluation that leaves its mode behind, https://github.com/pfnet/pytorch-pfn-extras/issues/688",
    "training.evaluation",
)
def evaluation_drops_gradients_of_the_next_step(original: Function, hit: Hit) -> Function:
    """What was switched off for an evaluation stays off: the next step trains nothing."""

    def planted(self: Any, inputs: Any) -> Any:
        outputs, update = original(self, inputs), self.update

        def skipped() -> None:
            hit()
            self.update = update

        self.update = skipped
        return outputs

    return planted


@fault(
    "trainer:Trainer.__init__",
    "state of a process that outlives the model it belongs to",
    "training.plain",
)
def optimizer_of_the_model_before(original: Function, hit: Hit) -> Function:
    """A trainer goes on with the optimizer of the first one that its rank has built."""
    known: dict[int, Any] = {}

    def planted(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
        original(self, model, *arguments, **options)
        rank = model.axis.rank + model.axis.size * model.replicas.rank
        if rank in known:
            hit()
        self.optimizer = known.setdefault(rank, self.optimizer)

    return planted


@fault(
    "sharding.flat_buffer:FlatBuffer.drop_local_gradients",
    "layers that only some ranks use, https://github.com/pytorch/pytorch/issues/158719",
    "training.plain",
)
def gradient_of_an_unused_layer_kept(original: Function, hit: Hit) -> Function:
    """The local gradient of a parameter stays after its reduction where another one of its unit had none."""

    def planted(self: Any) -> None:
        kept = [parameter.grad for parameter in self.parameters]
        original(self)
        if any(one is None for one in kept) and any(one is not None for one in kept):
            hit()
            for parameter, gradient in zip(self.parameters, kept, strict=True):
                parameter.grad = gradient

    return planted


@fault(
    "clipping.tied_parameters:groups",
    "cross terms of a weight that is used twice, arXiv:2110.05679",
    "clipping.*",
)
def second_run_of_a_layer_is_another_layer(original: Function, hit: Hit) -> Function:
    """Runs of one layer in one forward are groups of their own: their squared norms are added."""

    def planted(found: Any) -> Any:
        groups = original(found)
        layers = {id(found[position].layer) for group in groups for position in group}
        if len(layers) == len(found):
            return groups
        hit()
        return [[position] for position in range(len(found))]

    return planted


@fault(
    "torch.optim.optimizer:Optimizer.add_param_group",
    "weight decay of all parameters alike, https://github.com/verl-project/verl/issues/5070",
    "training.plain",
    subject="ddp",
)
def options_of_groups_lost(original: Function, hit: Hit) -> Function:
    """Each group of an optimizer's parameters has its defaults, whatever was asked of it."""

    def planted(self: Any, param_group: Any) -> None:
        if len(param_group) > 1:
            hit()
        original(self, {"params": param_group["params"]})

    return planted
