"""What a script splits without DTensor has the places that its first values tell, and none where they tell nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsdpcheck.comparison.observation.whole import Assembled, assembled
from fsdpcheck.comparison.record import Key, Observation, Piece, RankRecord
from tests.comparison.observation.observing import observe

FIRST, AFTER = Key(0, "initial parameter", "w"), Key(0, "parameter", "w")
WHOLE = torch.arange(24, dtype=torch.float64).reshape(6, 4)


def _record(**parameters: Tensor) -> RankRecord:
    """Of a rank whose parameters are twice as large after the step."""
    found = RankRecord()
    for name, value in parameters.items():
        for key, factor in ((FIRST, 1), (AFTER, 2)):
            found.pieces[key._replace(name=name)] = Piece(tuple(value.shape), (factor * value).reshape(-1).clone())
    return found


def _assembled(*records: RankRecord, alone: RankRecord | None = None) -> Assembled:
    one = assembled(Observation(1, (alone or _record(w=WHOLE),), ()))
    return assembled(Observation(len(records), records, ()), one)


@pytest.mark.parametrize(("dim", "ranks"), [(0, 2), (0, 4), (1, 2), (1, 4)])
def test_parts_are_placed_where_the_whole_begins_so(dim: int, ranks: int) -> None:
    parts = WHOLE.chunk(ranks, dim)
    found = _assembled(*(_record(w=parts[rank % len(parts)]) for rank in (1, 0, 3, 2, 0)))
    assert torch.equal(found.values[AFTER], 2 * WHOLE)
    assert (found.gaps, found.replicas, found.split) == ({}, {}, {"w": dim})


@pytest.mark.parametrize("ranks", [4, 5])
def test_zeros_behind_the_end_are_padding(ranks: int) -> None:
    """Of 6 rows in parts of 2, and of 24 values in parts of 7: with one rank more than are needed, too."""
    flat, rows = WHOLE.reshape(-1) + 1, WHOLE + 1
    padded = torch.cat([flat, torch.zeros(35 - 24, dtype=torch.float64)]).split(7)
    longer = torch.cat([rows, torch.zeros(4, 4, dtype=torch.float64)]).split(2)
    records = [_record(w=padded[rank], v=longer[rank]) for rank in range(ranks)]
    records[3].pieces[AFTER].values[-1] = 7.0  # padding may be anything later: nobody reads it
    found = _assembled(*records, alone=_record(w=flat, v=rows))
    assert torch.equal(found.values[AFTER], 2 * flat)
    assert torch.equal(found.values[AFTER._replace(name="v")], 2 * rows)
    assert (found.gaps, found.replicas, found.split) == ({}, {}, {"w": 0, "v": 0})


def test_what_is_not_zero_behind_the_end_is_no_padding() -> None:
    flat = WHOLE.reshape(-1) + 1
    padded = torch.cat([flat, torch.ones(4, dtype=torch.float64)]).split(7)
    found = _assembled(*(_record(w=part) for part in padded), alone=_record(w=flat))
    assert found.gaps[AFTER] == "what rank 3 begins with is no slice of what one rank alone begins with"


def test_ranks_with_the_same_part_are_replicas() -> None:
    records = [_record(w=WHOLE[:3]), _record(w=WHOLE[3:]), _record(w=WHOLE[:3])]
    records[2].pieces[AFTER].values[4] += 1
    found = _assembled(*records)
    assert list(found.replicas) == [AFTER]
    assert found.replicas[AFTER] == (0, 2, 1.0, (1, 0))


def test_a_part_that_no_rank_has_is_a_gap() -> None:
    found = _assembled(_record(w=WHOLE[:3]), _record(w=WHOLE[:3]))
    assert found.gaps[AFTER] == "12 of 24 values are on no rank, the first at [3, 0]; ranks 0, 1 have the others"


def test_equal_values_are_placed_as_others_are() -> None:
    zeros = torch.zeros(6, dtype=torch.float64)
    parts = [_record(w=WHOLE[3 * rank : 3 * rank + 3], bias=zeros[:3]) for rank in (1, 0)]
    bias = AFTER._replace(name="bias")
    for record, first in zip(parts, (3.0, 0.0), strict=True):
        record.pieces[bias].values.copy_(first + torch.arange(3))
    found = _assembled(*parts, alone=_record(w=WHOLE, bias=zeros))
    assert torch.equal(found.values[bias], torch.arange(6, dtype=torch.float64))
    assert found.split == {"w": 0, "bias": 0}


def test_equal_values_alone_have_no_places() -> None:
    zeros = torch.zeros(6, dtype=torch.float64)
    found = _assembled(_record(w=zeros[:3]), _record(w=zeros[:3]), alone=_record(w=zeros))
    told = "it begins with equal values: which part of it is on ranks 0, 1 is not known"
    assert found == Assembled(gaps={FIRST: told, AFTER: told})


@pytest.mark.parametrize("part", [WHOLE[:3] + 1, WHOLE[:3, :2], WHOLE[[0, 2, 4]], WHOLE[:3].reshape(-1)])
def test_what_is_no_slice_has_no_places(part: Tensor) -> None:
    found = _assembled(_record(w=part), _record(w=WHOLE[3:]))
    told = "what rank 0 begins with is no slice of what one rank alone begins with"
    assert found == Assembled(gaps={FIRST: told, AFTER: told})


def test_a_script_that_splits_by_hand_is_put_together(tmp_path: Path) -> None:
    source = """
    whole = whole_numbers(6, 3)
    model = nn.Linear(3, 6 // W)
    model.weight.data = whole.chunk(W)[rank].clone()
    model.bias.data = torch.zeros(6 // W)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    (model(x) * whole_numbers(BATCH, 6).chunk(W, 1)[rank]).sum().backward()
    optimizer.step()
    """
    one, two = (observe(tmp_path, source, size) for size in (1, 2))
    found = assembled(two.observation, one.whole)
    assert (found.gaps, found.split) == ({}, {"weight": 0, "bias": 0})
    assert found.values.keys() == one.whole.values.keys()
    assert all(torch.equal(found.values[key], value) for key, value in one.whole.values.items())
