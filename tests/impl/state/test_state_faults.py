"""Each way in which saving and loading could go wrong, planted, is caught by the tests of the state."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from fsdpcheck.impl import state
from fsdpcheck.impl.sharding.flat_buffer import FlatBuffer
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.spans import Span
from fsdpcheck.impl.state import optimizer_state, planners
from tests.impl.state.test_state import loads, resumed, saves
from tests.impl.training import Counters, Net, Training, assert_same, flat, replicated_flat

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

Plant = Callable[[pytest.MonkeyPatch], None]


def moments_not_read(patch: pytest.MonkeyPatch) -> None:
    prepare = optimizer_state.prepare

    def forgetful(*arguments: Any) -> optimizer_state.Prepared:
        prepared = prepare(*arguments)
        prepared.spans.clear()
        return prepared

    patch.setattr(optimizer_state, "prepare", forgetful)


def moments_of_another(patch: pytest.MonkeyPatch) -> None:
    """State given to another parameter of its size, as by number where an optimizer orders parameters otherwise."""
    prepare = optimizer_state.prepare

    def mistaken(*arguments: Any) -> optimizer_state.Prepared:
        prepared = prepare(*arguments)
        one, other = (optimizer_state.key(name, "exp_avg") for name in ("units.0.0.bias", "units.0.2.bias"))
        prepared.spans[one], prepared.spans[other] = prepared.spans[other], prepared.spans[one]
        return prepared

    patch.setattr(optimizer_state, "prepare", mistaken)


def steps_lost(patch: pytest.MonkeyPatch) -> None:
    of = optimizer_state.Described.of

    def without_steps(self: optimizer_state.Described, name: str) -> Any:
        elementwise, scalars = of(self, name)
        return elementwise, {entry: torch.zeros_like(value) for entry, value in scalars.items()}

    patch.setattr(optimizer_state.Described, "of", without_steps)


def hyperparameters_not_taken(patch: pytest.MonkeyPatch) -> None:
    def states_only(self: optimizer_state.Prepared, optimizer: torch.optim.Optimizer) -> None:
        for shard, entries in self.states:
            optimizer.state[shard] = entries

    patch.setattr(optimizer_state.Prepared, "take_over", states_only)


class Deaf(Counters):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Forgets it."""


def extra_not_loaded(patch: pytest.MonkeyPatch) -> None:
    init = state._Loading.__init__

    def without(self: Any, model: Any, optimizer: Any, extra: Any) -> None:
        init(self, model, optimizer, extra)
        self.extra = dict.fromkeys(extra, Deaf(0, 0))

    patch.setattr(state._Loading, "__init__", without)


def shifted_by_one(patch: pytest.MonkeyPatch) -> None:
    """Parts of rank 1 on, one element late, both written and read."""
    cut = FlatBuffer.cut

    def late(self: FlatBuffer, like: Tensor) -> dict[str, Span]:
        spans = cut(self, like)
        return {n: Span(s.shape, s.start + 1, s.value) if s.start and s.value.numel() else s for n, s in spans.items()}

    patch.setattr(FlatBuffer, "cut", late)


def read_shifted_by_one(patch: pytest.MonkeyPatch) -> None:
    boxes = Span.boxes
    read = planners.SpanReader.create_local_plan

    def late(self: Span) -> Any:
        room = self.start > 0
        return boxes(Span(self.shape, self.start - 1, self.value) if room else self)

    def plan(self: planners.SpanReader) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Span, "boxes", late)
            return read(self)

    patch.setattr(planners.SpanReader, "create_local_plan", plan)


def padding_cut_too(patch: pytest.MonkeyPatch) -> None:
    """The last parameter of a shard takes the padding along."""
    cut = FlatBuffer.cut

    def greedy(self: FlatBuffer, like: Tensor) -> dict[str, Span]:
        spans = cut(self, like)
        name, last = list(spans.items())[-1]
        return spans | {name: Span(last.shape, last.start, like[self.real - last.value.numel() :])}

    patch.setattr(FlatBuffer, "cut", greedy)


def read_part_of_it(patch: pytest.MonkeyPatch) -> None:
    reads = planners.create_read_items_for_chunk_list
    patch.setattr(planners, "create_read_items_for_chunk_list", lambda *arguments: reads(*arguments)[:-1])


CAUGHT: dict[Plant, str] = {
    moments_not_read: r"exp_avg",
    moments_of_another: r"exp_avg",
    steps_lost: r"step",
    hyperparameters_not_taken: r"\['lr'\]",
    extra_not_loaded: r"assert \{\(0, 0\)\} == \{\(2, 2\)\}",
    shifted_by_one: "are not the whole of it",
    read_shifted_by_one: r"\['head.weight'\]",
    padding_cut_too: "are not the whole of it",
    read_part_of_it: "the file lacks a part of",
}


@pytest.mark.parametrize("plant", CAUGHT, ids=lambda plant: plant.__name__)
def test_a_round_trip_catches(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    if plant in (shifted_by_one, padding_cut_too):
        plant(monkeypatch)
        with pytest.raises(AssertionError, match=CAUGHT[plant]):
            saves(ranks, tmp_path, "flat", 3)
    else:
        wanted = saves(ranks, tmp_path, "flat", 3)
        plant(monkeypatch)
        with pytest.raises(AssertionError, match=CAUGHT[plant]):
            assert_same(loads(ranks, tmp_path, "flat", 2), wanted)


@pytest.mark.parametrize("plant", [moments_not_read, moments_of_another, steps_lost, hyperparameters_not_taken])
def test_a_resumed_training_catches(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    plant(monkeypatch)
    assert resumed(ranks, tmp_path, "adam", ("flat", "per-parameter", "flat")) != ""


MARK = 12345.678


def marked(rank: int, folder: Path) -> None:
    """Saves with a mark in all padding."""
    training = Training(flat, "adam", rank, 4)
    training.step()
    assert isinstance(training.model, ShardedModel)
    for buffer in (buffer for unit in training.model.units for buffer in unit.buffers):
        moments = [value for value in training.optimizer.state.get(buffer.shard, {}).values() if value.dim()]
        for tensor in [buffer.shard.detach(), *moments]:
            tensor[buffer.padding] = MARK
    training.save(folder)


def marks(folder: Path) -> int:
    return sum(path.read_bytes().count(struct.pack("<d", MARK)) for path in folder.iterdir())


def test_no_padding_is_in_any_file(ranks: Ranks, tmp_path: Path) -> None:
    ranks(lambda rank: marked(rank, tmp_path), 4)
    assert marks(tmp_path) == 0


def test_padding_in_a_file_would_be_found(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor written with all of its storage."""

    def with_storage(self: planners.SpanWriter, item: Any) -> Tensor:
        view = self._views[item.index]
        return torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(planners.SpanWriter, "resolve_data", with_storage)
    ranks(lambda rank: marked(rank, tmp_path), 4)
    assert marks(tmp_path) > 0


def test_replicas_that_all_write_are_refused(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = state.sharded_state_dict

    def all_write(model: Any) -> dict[str, Span]:
        return {name: Span(span.shape, span.start, span.value) for name, span in full(model).items()}

    monkeypatch.setattr(state, "sharded_state_dict", all_write)
    execution = ranks.run(lambda rank: state.save(tmp_path, replicated_flat(Net())), 4)
    assert execution.failure is not None
    assert "are not the whole of it" in execution.failure.text
