"""For each mechanism that can be shown a situation, made by hand, in which it changes something."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from fsdpcheck.impl.clipping.batch_layout import REPLICATED
from tests.mechanisms.by_hand import (
    Attention,
    Situation,
    Unused,
    alone,
    dealt,
    evaluated_before_step,
    frozen_bias,
    frozen_in_backward,
    gathered_on_first,
    halved,
    ignoring,
    in_dataset_order,
    initial,
    kernel_of_odd_sizes,
    loaded_while_gathered,
    mixed,
    noise_of_large,
    of_layer,
    overflowed,
    poisson,
    resumed,
    sampler,
    spoiled,
    thawed,
    tied,
    training,
    two_groups,
)
from tests.mechanisms.training import filled, numbers, per_parameter, private, replicated

HALVES = ([[0, 1]], [[2, 3]])
TWO_OF_ONE = ([[0], [1]], [[2], [3]])
FOUR = ([[0]], [[1]], [[2]], [[3]])

SITUATIONS: dict[str, Situation] = {
    "normalised_by_one_forward": training(rows=([[0, 1], [2, 3]],)),
    "replicas_of_single_shards": training(rows=HALVES, way=replicated(2, 1)),
    "sum_is_the_gradient_itself": ignoring(),
    "unsharded_gradient_overwritten": training(rows=TWO_OF_ONE, privacy=private(), sync_every=False),
    "last_use_only": training(rows=HALVES, model=tied, privacy=private()),
    "summed_over_the_other_axis": training(rows=FOUR, way=replicated(2, 2)),
    "first_micro_batch_synchronised": training(rows=TWO_OF_ONE, sync_every=False),
    "rebound_gradient_loses_the_sum": ignoring(),
    "clipped_each_micro_batch": training(rows=TWO_OF_ONE, max_grad_norm=0.5),
    "norms_of_ranks_averaged": training(rows=HALVES, max_grad_norm=0.5),
    "tied_counted_by_name": training(rows=HALVES, model=tied, max_grad_norm=0.5),
    "clipped_the_wrong_way": training(max_grad_norm=0.5),
    "norm_not_returned": training(max_grad_norm=0.5),
    "odd_padding_before": of_layer(partial(nn.Conv1d, 2, 3, 2, padding="same"), numbers(4, 2, 5, seed=1)),
    "dilation_left_out": of_layer(partial(nn.Conv1d, 2, 3, 2, dilation=2), numbers(4, 2, 5, seed=1)),
    "groups_as_if_depthwise": of_layer(partial(nn.Conv1d, 4, 4, 2, groups=2), numbers(4, 4, 5, seed=1)),
    "mean_over_those_left_out": of_layer(
        partial(nn.EmbeddingBag, 5, 2, mode="mean", padding_idx=0),
        torch.tensor([[0, 1, 2], [0, 0, 3], [1, 1, 4], [2, 0, 2]]),
    ),
    "padding_row_has_a_gradient": of_layer(
        partial(nn.Embedding, 5, 2, padding_idx=0), torch.tensor([[0, 1, 2], [0, 0, 3], [1, 1, 4], [2, 0, 2]])
    ),
    "heads_spliced_into_positions": of_layer(Attention, numbers(4, 3, 4, seed=1)),
    "eps_of_another_model": of_layer(partial(nn.RMSNorm, 3), numbers(4, 2, 3, seed=1)),
    "unused_layer_raises": training(model=lambda: filled(Unused()), privacy=private()),
    "sum_over_ranks_discarded": training(
        rows=([[0, 1, 2, 3]],) * 2, layout=REPLICATED, privacy=private(contribution="partial")
    ),
    "values_stay_unsorted": Situation(in_dataset_order, 2),
    "bias_taken_for_granted": of_layer(partial(nn.LayerNorm, 3, bias=False), numbers(4, 2, 3, seed=1)),
    "evaluation_recorded": Situation(evaluated_before_step),
    "last_tile_left_out": alone(kernel_of_odd_sizes),
    "one_seed_for_all_parameters": training(privacy=private(noise=1.0)),
    "one_seed_for_all_shards": training(rows=HALVES, privacy=private(noise=1.0)),
    "stream_replayed": alone(noise_of_large),
    "resumed_a_step_early": resumed(privacy=private(noise=1.0)),
    "bound_counted_twice": training(privacy=private(noise=1.0)),
    "order_of_each_rank": dealt(),
    "same_order_in_all_epochs": dealt(),
    "tail_never_drawn": dealt(drop_last=False),
    "repetitions_taken_for_records": dealt(drop_last=False),
    "seed_not_passed_on": alone(lambda: [sampler(0, 3, key=seed).order(0) for seed in (1, 2)]),
    "resumed_at_the_beginning": alone(lambda: list(sampler(0, 2).steps(0, start=1))),
    "ranges_overlap": alone(poisson),
    "as_many_micro_batches_as_drawn": alone(poisson),
    "offset_from_own_size": training(
        rows=([[0]], [[1]], [[2, 3]]),
        model=lambda: filled(nn.Sequential(nn.Linear(3, 5))),
        y=numbers(4, 5, seed=21),
        way=per_parameter,
        privacy=private(noise=1.0),
    ),
    "count_no_multiple_of_ranks": training(rows=([[0]], [[1]], [[2, 3]])),
    "range_begins_below_zero": training(max_grad_norm=0.5),
    "shards_of_rounded_parameters": mixed(),
    "reduced_in_the_compute_dtype": mixed(rows=HALVES),
    "accumulated_in_the_compute_dtype": mixed(rows=([[0], [1], [2, 3]],), sync_every=False),
    "flag_of_the_first_parameter": training(model=frozen_bias),
    "thawing_goes_unseen": Situation(thawed),
    "frozen_units_stay_gathered": Situation(frozen_in_backward, 2),
    "step_counted_that_was_none": resumed(),
    "step_counter_becomes_a_number": resumed(),
    "learning_rate_not_loaded": resumed(halved),
    "options_of_the_first_group": resumed(optimizer=two_groups),
    "loaded_beside_gathered_parameters": Situation(loaded_while_gathered, 2),
    "shard_without_parameters_has_no_state": resumed(
        rows=FOUR, model=lambda: filled(nn.Sequential(nn.Linear(3, 1, bias=False)))
    ),
    "buffers_that_are_not_saved_not_sent": Situation(initial, 4),
    "buffers_of_other_replicas_left": Situation(initial, 4),
    "sent_from_a_global_rank": Situation(initial, 4),
    "gathered_on_a_global_rank": Situation(gathered_on_first, 4),
    "gather_never_waited_for": training(rows=HALVES),
    "backward_skipped_without_samples": training(rows=([[0, 1]], [[]])),
    "first_rank_decides": training(rows=HALVES, y=spoiled(2), privacy=private()),
    "overflowed_rank_leaves_the_norm": Situation(overflowed, 2),
    "root_is_never_gathered_again": training(rows=HALVES, steps=2),
}
