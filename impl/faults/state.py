"""Planted bugs of checkpoints: state that does not come back, comes back in part, or lies beside what should not."""

from __future__ import annotations

from typing import Any

from ._fault import Function, Hit, fault


@fault(
    "state.optimizer_state:Prepared.take_over",
    "moments dropped without a word, https://github.com/areal-project/AReaL/pull/1468",
    "state.resumed",
    cause="optimizer's state( did not|.*exp_avg|.*momentum)",
)
def moments_not_taken_over(original: Function, hit: Hit) -> Function:
    """Hyperparameters of the optimizer come back, and its elementwise state and step counters do not."""

    def planted(self: Any, optimizer: Any) -> None:
        if any(state for _, state in self.states):
            hit()
        self.states = []
        original(self, optimizer)

    return planted


@fault(
    "state:count_on",
    "a counter that is left out of the checkpoint, https://github.com/meta-pytorch/opacus/pull/429",
    "state.noise",
    cause="step counter|noise of an earlier step",
)
def noise_counter_starts_again(original: Function, hit: Hit) -> Function:
    """The number of steps taken is not taken over: noise that was released is used again."""

    def planted(model: Any, header: Any) -> None:
        hit()

    return planted


@fault(
    "state:_Loading.wanted",
    "base weights left out of what is loaded, as of an adapter that is trained on a frozen model",
    "state.resumed",
    cause="are not loaded: they keep",
)
def frozen_parameters_not_loaded(original: Function, hit: Hit) -> Function:
    """Frozen parameters are saved, and keep what the new model has when they are loaded."""

    def planted(self: Any, metadata: Any) -> Any:
        found = original(self, metadata)
        frozen = {f"model.{name}" for shard in self.model.frozen_shards() for name in self.model.cut(shard, shard)}
        if frozen & found.keys():
            hit()
        return {name: span for name, span in found.items() if name not in frozen}

    return planted


@fault(
    "state:load",
    "a load beside what is gathered, https://github.com/pytorch/pytorch/issues/117421",
    "state.resumed",
    cause="had gathered before the load stayed",
)
def what_is_gathered_outlives_a_load(original: Function, hit: Hit) -> Function:
    """Shards are filled while parameters are gathered, and the gathered ones stay as they were."""

    def planted(folder: Any, model: Any, *more: Any) -> None:
        if any(unit.is_unsharded for unit in model.units):
            hit()
        model.reshard = lambda: None
        try:
            original(folder, model, *more)
        finally:
            del model.reshard

    return planted


@fault(
    "state.optimizer_state:describe",
    "options of one group for all, https://github.com/pytorch/pytorch/pull/147730",
    "state.resumed",
    cause="hyperparameters, did not come back",
)
def options_of_one_group_saved_for_all(original: Function, hit: Hit) -> Function:
    """Of several groups of parameters the options of one are saved for the parameters of all."""

    def planted(model: Any, optimizer: Any) -> Any:
        found = original(model, optimizer)
        options = list(found.hyperparameters.values())
        if any(one != options[0] for one in options):
            hit()
        found.hyperparameters = {name: dict(options[0]) for name in found.hyperparameters}
        return found

    return planted


@fault(
    "state.planners:SpanReader.create_local_plan",
    "state of another number of ranks loaded in part, https://github.com/ServiceNow/Fast-LLM/issues/436",
    "state.resharded",
    cause="only the part that one rank wrote",
)
def first_writer_alone_is_read(original: Function, hit: Hit) -> Function:
    """Of each part that a rank loads only what one rank had written: all of it, if the number of ranks is the same."""

    def planted(self: Any) -> Any:
        plan = original(self)
        first: dict[Any, Any] = {}
        for item in plan.items:
            first.setdefault(item.dest_index, item)
        if len(first) < len(plan.items):
            hit()
        return type(plan)(list(first.values()))

    return planted


@fault(
    "state:save",
    "frozen weights that lie in the file without their values, https://github.com/deepspeedai/DeepSpeed/pull/3205",
    "state.readable",
    cause="frozen parameters are zero in the checkpoint",
)
def frozen_parameters_saved_as_zeros(original: Function, hit: Hit) -> Function:
    """What is frozen is saved as zeros, as where it was freed when it is written."""

    def planted(folder: Any, model: Any, *more: Any) -> None:
        frozen = [shard.detach() for shard in model.frozen_shards() if shard.numel()]
        kept = [shard.clone() for shard in frozen]
        if frozen:
            hit()
        for shard in frozen:
            shard.zero_()
        original(folder, model, *more)
        for shard, values in zip(frozen, kept, strict=True):
            shard.copy_(values)

    return planted


@fault(
    "state.planners:SpanWriter.resolve_data",
    "padding in saved moments, https://github.com/deepspeedai/DeepSpeed/pull/1380",
    "state.shape",
    cause="memory around a parameter",
)
def moments_saved_with_their_padding(original: Function, hit: Hit) -> Function:
    """Of momentum and moments the whole storage is written in place of each part, padding and all."""

    def planted(self: Any, write_item: Any) -> Any:
        view = original(self, write_item)
        whole = self._views[write_item.index].untyped_storage()
        if not write_item.index.fqn.startswith("optimizer.") or whole.nbytes() == view.untyped_storage().nbytes():
            return view
        hit()
        return view.new_empty(0).set_(whole)

    return planted


@fault(
    "state.planners:SpanWriter.resolve_data",
    "padding in a saved shard, https://github.com/deepspeedai/DeepSpeed/pull/1380",
    "state.shape",
    cause="memory around a parameter",
)
def whole_storage_written(original: Function, hit: Hit) -> Function:
    """In place of each part of a shard the whole storage is written: other parameters, and the padding."""

    def planted(self: Any, write_item: Any) -> Any:
        view = original(self, write_item)
        whole = self._views[write_item.index].untyped_storage()
        if whole.nbytes() == view.untyped_storage().nbytes():
            return view
        hit()
        return view.new_empty(0).set_(whole)

    return planted
