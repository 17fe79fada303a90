"""Planted bugs of what happens in few trainings: evaluations, layers left out or run again, models built before."""

from __future__ import annotations

from typing import Any

import torch

from ..sharding import fsdp2_units
from ._fault import Function, Hit, fault


@fault(
    "sharding.flat_buffer:FlatBuffer.allocate",
    "an evaluation that does not see the newest weights, https://github.com/pytorch/pytorch/issues/113203",
    "training.evaluation",
    cause="evaluation",
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
    cause="did not move at all",
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
    cause="did not move at all",
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
    "sharding.flat_buffer:FlatBuffer.local_gradients",
    "layers that only some ranks use, https://github.com/pytorch/pytorch/issues/158719",
    "training.*",
    cause="step before",
)
def gradient_of_an_unused_layer_is_the_last_one(original: Function, hit: Hit) -> Function:
    """Where a rank has no gradient of a parameter, the one that it had before is reduced again."""

    def planted(self: Any) -> Any:
        found, last = original(self), vars(self).setdefault("_last", {})
        for position, gradient in enumerate(found):
            if gradient is not None:
                last[position] = gradient.clone()
            elif position in last:
                hit()
                found[position] = last[position]
        return found

    return planted


@fault(
    "clipping.tied_parameters:groups",
    "runs of one layer taken for several, https://github.com/meta-pytorch/opacus/pull/738",
    "clipping.*",
    cause="no cross term",
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
    cause="groups are lost",
    subject="ddp",
)
def options_of_groups_lost(original: Function, hit: Hit) -> Function:
    """Each group of an optimizer's parameters has its defaults, whatever was asked of it."""

    def planted(self: Any, param_group: Any) -> None:
        if len(param_group) > 1:
            hit()
        original(self, {"params": param_group["params"]})

    return planted


@fault(
    "sharding.flat_model:make_units",
    "a weight that is untied where each unit flattens its own, https://github.com/Lightning-AI/pytorch-lightning/pull/21613",
    "training.tied-apart",
    cause="keeps a parameter of its own of a weight that two share",
)
def a_weight_of_two_units_is_untied(original: Function, hit: Hit) -> Function:
    """Each unit shards its own uses of a parameter, so that one of two units is two parameters from then on."""

    def planted(module: Any, unit_names: Any, axis: Any, replicas: Any, places: Any, *more: Any) -> Any:
        apart = [uses for shared in places for uses in _by_owner(shared, unit_names)]
        if len(apart) > len(places):
            hit()
        return original(module, unit_names, axis, replicas, apart, *more)

    return planted


@fault(
    "sharding.flat_model:change",
    "requires_grad that is not passed on to the flat parameter, https://github.com/pytorch/pytorch/issues/104148",
    "training.thawed",
    cause="what is thawed behind the first step|did not move at all",
)
def thawed_parameters_stay_frozen(original: Function, hit: Hit) -> Function:
    """A parameter that was frozen when the model was sharded stays so: that its user thawed it is not seen."""

    def planted(module: Any, held: Any) -> Any:
        told = original(module, held)
        if "requires_grad" not in told:
            return told
        hit()
        return ""

    return planted


@fault(
    "torch.optim.optimizer:Optimizer.zero_grad",
    "gradients that are zero and not gone, which move what is frozen, https://github.com/neuralmagic/sparseml/pull/966",
    "training.thawed",
    cause="frozen .*trained all the same",
    subject="fully_shard",
)
def gradients_of_the_frozen_are_zeros(original: Function, hit: Hit) -> Function:
    """Gradients are set to zero in place of None: what is frozen again is moved by its moments and by weight decay."""

    def planted(self: Any, set_to_none: bool = True) -> None:
        original(self, set_to_none=False)
        if any(
            one.grad is not None and not one.requires_grad for group in self.param_groups for one in group["params"]
        ):
            hit()

    return planted


@fault(
    "torch.optim.adam:adam",
    "one count of steps for parameters of other histories, https://github.com/deepspeedai/DeepSpeed/pull/8471",
    "training.steps-counted",
    cause="bias correction .*counts",
    subject="ddp:finding_unused",
)
def one_counter_for_all_parameters(original: Function, hit: Hit) -> Function:
    """Each parameter's bias correction takes the largest count of steps of all parameters that are updated."""

    def planted(params: Any, grads: Any, averages: Any, squares: Any, largest: Any, counts: Any, **more: Any) -> None:
        most = max(counts, default=None)
        for count in counts:
            if count != most:
                hit()
                count.copy_(most)
        original(params, grads, averages, squares, largest, counts, **more)

    return planted


@fault(
    "trainer:Trainer.update",
    "counts that differ between ranks, https://github.com/NVIDIA/TransformerEngine/issues/1986",
    "training.steps-counted",
    cause="bias correction .*counts",
)
def steps_without_a_gradient_are_not_counted(original: Function, hit: Hit) -> Function:
    """A rank counts no step of a unit in whose shard all gradients are zero: Adam corrects a later one for fewer."""

    def planted(self: Any) -> None:
        original(self)
        for shard in self.model.shards() if self.optimizer is not None else ():
            count = self.optimizer.state.get(shard, {}).get("step")
            if count is not None and count > 1 and not shard.grad.any():
                hit()
                count -= 1

    return planted


def _by_owner(uses: Any, unit_names: Any) -> list[Any]:
    """The uses of one parameter, by the unit in which they stand."""
    found: dict[str, list[Any]] = {}
    for slot in uses:
        found.setdefault(fsdp2_units.owner(slot.name, unit_names), []).append(slot)
    return list(found.values())
