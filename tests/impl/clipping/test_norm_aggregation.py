"""The aggregation table, row by row, and the gather in dataset order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from fsdpcheck.impl import faults
from fsdpcheck.impl.clipping import norm_aggregation
from fsdpcheck.impl.clipping.norm_aggregation import InDatasetOrder, Layout, Terms
from fsdpcheck.impl.sharding import collectives

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks


def per_rank(*rows: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def aggregated(ranks: Any, layout: Layout, complete: list[torch.Tensor], partial: list[torch.Tensor] | None) -> Any:
    def body(rank: int) -> list[float]:
        terms = Terms(complete[rank], None if partial is None else partial[rank])
        values: list[float] = norm_aggregation.squared_norms(terms, layout, collectives.axis()).tolist()
        return values

    return ranks(body, len(complete))


def test_distributed_and_complete_needs_no_communication(ranks: Ranks) -> None:
    assert aggregated(ranks, "distributed", per_rank([1, 2], [3], []), None) == [[1, 2], [3], []]
    assert ranks.trace(0) == []


def test_replicated_and_complete_needs_no_communication(ranks: Ranks) -> None:
    assert aggregated(ranks, "replicated", per_rank([4, 9], [4, 9]), None) == [[4, 9], [4, 9]]
    assert ranks.trace(0) == []


def test_replicated_and_partial_is_summed_by_one_collective(ranks: Ranks) -> None:
    none = per_rank([0, 0], [0, 0], [0, 0])
    partial = per_rank([1, 10], [2, 20], [3, 30])
    assert aggregated(ranks, "replicated", none, partial) == [[6, 60]] * 3
    assert ranks.trace(0) == [("all_reduce", "(per-sample norms)")]


def test_mixed_terms_count_the_complete_ones_once(ranks: Ranks) -> None:
    assert aggregated(ranks, "replicated", per_rank([100], [100]), per_rank([1], [2])) == [[103]] * 2


def test_a_rank_does_not_change_the_terms_it_was_given(ranks: Ranks) -> None:
    partial = per_rank([1], [2])
    aggregated(ranks, "replicated", per_rank([0], [0]), partial)
    assert [term.tolist() for term in partial] == [[1], [2]]


def test_distributed_and_partial_is_refused(ranks: Ranks) -> None:
    execution = ranks.run(
        lambda rank: norm_aggregation.squared_norms(
            Terms(torch.zeros(1), torch.zeros(1)), "distributed", collectives.axis()
        ),
        2,
    )
    assert execution.failure is not None
    assert execution.failure.exception == "ValueError"
    assert "no rank holds the missing parts of any sample" in execution.failure.text


INDICES = [[5, 0, 3], [], [1, 5], [2, 4, 7]]


def gathered(ranks: Ranks) -> list[InDatasetOrder]:
    def body(rank: int) -> InDatasetOrder:
        own = INDICES[rank]
        values = torch.tensor([10.0 * index for index in own], dtype=torch.float64)
        return norm_aggregation.gather_in_dataset_order(values, own, 4, collectives.axis())

    found: list[InDatasetOrder] = ranks(body, len(INDICES))
    return found


def test_gathered_norms_are_in_dataset_order_and_duplicates_are_listed(ranks: Ranks) -> None:
    for found in gathered(ranks):
        assert found.indices.tolist() == [0, 1, 2, 3, 4, 5, 5, 7]
        assert found.values.tolist() == [0, 10, 20, 30, 40, 50, 50, 70]
        assert found.duplicates == (5,)


def test_the_size_of_a_gather_does_not_tell_local_sizes(ranks: Ranks) -> None:
    gathered(ranks)
    assert ranks.execution is not None
    assert {call.inputs[0][1] for rank in ranks.execution.ranks for call in rank.trace} == {(4,)}


def test_a_missing_reorder_is_seen(ranks: Ranks) -> None:
    with faults.install("gathered_norms_left_in_rank_order") as fault:
        found = gathered(ranks)[0]
    assert fault.hits == 4
    assert found.values.tolist() == [50, 0, 30, 10, 50, 20, 40, 70]


def test_more_samples_than_the_public_bound_are_refused() -> None:
    with pytest.raises(ValueError, match="3 values and 3 indices do not fit a public bound of 2"):
        norm_aggregation.gather_in_dataset_order(torch.zeros(3), [1, 2, 3], 2, collectives.Axis(None, 0, 1))


def test_a_sample_is_not_lost_for_a_negative_index() -> None:
    with pytest.raises(ValueError, match="got the sample index -1, wanted none below 0"):
        norm_aggregation.gather_in_dataset_order(torch.zeros(3), [1, -1, 2], 4, collectives.Axis(None, 0, 1))
