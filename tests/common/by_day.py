"""Which rows of a long test run by day: some that stand for the others, all of which run by night.

A row is given by its number in the order of collection. Where a test has none by day, another one, which is named, sees
by day what it is about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import pytest


def _all_but(number: int, *rows: int) -> tuple[int, ...]:
    return tuple(row for row in range(number) if row not in rows)


ROWS: Final[dict[str, tuple[int, ...]]] = {
    "adapters/test_adapters.py::test_plain_training_is_exact_for_each_accepted_trait": (0,),  # the main job: the others
    "adapters/test_moments.py::test_a_moment_at_which_no_law_looks_may_be_left_out": (),  # test_who_announces_nothing
    "adapters/test_parallelisms.py::test_the_laws_of_plain_training_hold": (0, 1, 5, 9, 13, 17, *range(20, 40)),
    "adapters/test_promises.py::test_exact_factors_of_nested_norms_are_a_contradiction": (),  # its file
    "adapters/test_user_checkpoints.py::test_a_wrong_function_is_found": (0,),
    "adapters/test_user_checkpoints.py::test_right_functions_hold": (1,),
    "adapters/test_user_parts.py::test_a_function_that_breaks_its_protocol_is_told": (0, 2),
    "adapters/test_user_parts.py::test_a_wrong_function_is_found": (0, 1),
    "adapters/test_user_parts.py::test_right_functions_hold": (0, 5),
    "adapters/test_user_parts.py::test_the_smallest_case_tells_what_is_wrong": (),  # diagnosis/
    "adapters/test_user_precision.py::test_what_is_not_said_or_not_done_is_refused": (0,),
    "adapters/test_user_precision.py::test_what_is_rounded_besides_is_found": (1,),
    "adapters/test_user_precision.py::test_what_is_said_and_done_holds": (0, 1),
    "adapters/test_user_private.py::test_a_right_step_holds": (0, 3),
    "adapters/test_user_private.py::test_a_wrong_step_is_found": (0, 1, 5),
    "checks/test_clipping.py::test_an_honest_clipped_gradient_in_another_order_stays_within_the_bound": (0,),
    "checks/test_initial_parameters.py::test_real_ranks_start_from_rank_0s_values_too": (0,),
    "cli/test_cli.py::test_accepted_traits_that_no_case_demanded_are_said": (0,),
    "cli/test_cli.py::test_the_nearest_name_is_offered": (0, 4),
    "cli/test_cli.py::test_traits_to_avoid_are_in_no_case_and_in_the_report": (),  # judging/test_coverage.py
    "cli/test_compare.py::test_a_mistake_about_ranks_is_found_and_named": (),  # comparison/
    "cli/test_coverage.py::test_what_no_case_reached_is_named_and_nothing_else": (),  # its file
    "cli/test_gate.py::test_a_waived_finding_is_shown_and_green_until_its_day": (),  # session/test_waivers.py
    "cli/test_gate.py::test_what_is_judged_no_more_is_red": (0, 5),
    "cli/test_init.py::test_what_is_written_holds_and_is_gated": (),  # test_a_bug_in_what_is_written_is_found
    "cli/test_run.py::test_a_folder_that_cannot_be_written_ends_all_ranks_with_code_2": (),  # engines/test_torchrun.py
    "cli/test_run.py::test_torchrun_hosts_a_session_on_its_own_ranks": (),  # engines/test_torchrun.py
    "cli/test_simulate.py::test_options_are_ours_before_the_script_and_right_after_it": (0, 1, 4),
    "cli/test_simulate_bad_input.py::test_a_program_is_told_by_name_what_it_cannot_do": tuple(range(0, 20, 2)),
    "comparison/test_reproducer.py::test_a_program_shows_the_mistake_and_ends_by_0_on_the_right_script": (0,),
    "comparison/test_reproducer.py::test_what_no_program_can_show_is_named": (0, 1, 2),
    "engines/test_agreement.py::test_both_engines_make_the_same_of_a_call": (2, 6, 10, 14, 18, 22),
    "engines/test_contract.py::test_objects_and_distributed_checkpoints_travel_unmodified": (1, 2),
    "engines/test_contract.py::test_the_same_request_gives_the_same_bits_and_calls": (0, 3, 7, 10, 13, 16),
    "engines/test_contract.py::test_what_goes_wrong_is_called_the_same": (0,),
    "engines/test_processes.py::test_a_worker_that_dies_is_a_failure_and_the_next_run_has_new_ones": (0, 3),
    "house/test_documents.py::test_the_finding_of_the_readme_is_what_is_printed": (),  # report/
    "house/test_packaging.py::test_the_processes_of_a_run_use_the_copy_that_started_them": (),  # tox runs the wheel
    "impl/clipping/test_private_layers.py::test_a_private_step_equals_the_single_device": (),  # properties/
    "impl/clipping/test_private_units.py::test_two_private_steps_equal_the_single_device": (),  # properties/
    "impl/costs/test_memory.py::test_nothing_as_large_as_a_layer_survives_a_step": (0,),
    "impl/kernels/test_kernels.py::test_the_triton_kernels": (),  # laws/test_kernels.py
    "impl/noise/test_noisy_steps.py::test_noise_is_the_single_device_one": (),  # properties/test_noise.py
    "impl/sharding/test_ignored_parameters.py::test_a_checkpoint_does_not_tell_what_was_left_out": (0, 4, 8),
    "impl/state/test_state.py::test_saved_one_way_and_loaded_another": (),  # properties/test_state.py
    "impl/state/test_state.py::test_stopped_twice_equals_never_stopped": (),  # properties/test_state.py
    "impl/state/test_state_engines.py::test_stopping_changes_no_bit": (0,),
    "impl/state/test_state_engines.py::test_what_one_engine_saved_another_loads_at_other_numbers_of_ranks": (0, 1, 3),
    "impl/state/test_state_faults.py::test_a_resumed_training_catches": (0, 2),
    "impl/state/test_state_refused.py::test_is_refused_on_all_ranks": tuple(range(0, 20, 2)),
    "judging/test_attribution.py::test_the_cause_of_a_planted_fault_is_named": (),  # diagnosis/
    "judging/test_drawing.py::test_a_process_that_somebody_kills_once_is_told_with_the_signal": (),  # session/
    "judging/test_first_wrong.py::test_of_a_right_step_nothing_is_told": (0, 1, 3),
    "judging/test_model_refusals.py::test_a_refusal_ends_one_law_and_not_the_session": (),  # its file
    "judging/test_model_refusals.py::test_what_is_no_refusal_stays_a_finding": (0, 1),
    "judging/test_model_separation.py::test_an_answer_that_is_none_is_no_verdict": (0,),
    "judging/test_model_separation.py::test_no_model_is_ever_imported_where_it_is_judged": (),  # the others of its file
    "judging/test_model_separation.py::test_what_an_import_replaces_by_name_is_taken_back_and_a_fault_is_found": (1,),
    "judging/test_nondeterminism.py::test_another_result_each_time_is_told_with_both_values_and_the_place": (),
    "judging/test_one_change.py::test_a_planted_fault_is_told_by_the_change_that_mends_it": (),  # test_first_wrong.py
    "judging/test_raised.py::test_what_a_step_raises_is_a_finding_by_whatever_name": (0,),
    "judging/test_unfit.py::test_the_session_ends_with_the_code_of_a_usage_error": (),  # its file
    "judging/test_unfit.py::test_what_cannot_run_here_is_an_error": (0, 1, 4),
    "judging/test_unfit.py::test_what_raises_in_every_dtype_is_a_finding": (0, 1),
    "judging/test_user_models.py::test_laws_hold_on_a_users_weights": (),  # what_is_wrong_with_clipping_is_found
    "judging/test_user_models.py::test_units_that_are_computed_again_may_take_inputs_by_keyword": (1,),
    "laws/test_kernels.py::test_right_kernels_keep_every_law": (0, 1, 3, 4, 6, 8),
    "oracle/test_certificate.py::test_accepted_cases_give_the_same_bits_in_any_order_of_summation": (0,),
    "processes/test_remote.py::test_it_ends_with_its_parent": (),  # test_supervisor.py
    "pytest_plugin/test_own_tests.py::test_a_law_that_a_hook_takes_away_is_red_and_one_that_it_deselects_is_counted": (
        ()
    ),
    "pytest_plugin/test_own_tests.py::test_a_law_that_breaks_in_a_test_that_passes_is_red": (),  # its file
    "pytest_plugin/test_own_tests.py::test_the_tests_of_the_document_pass": (),  # its file
    "pytest_plugin/test_own_tests.py::test_what_cannot_be_judged_is_an_error_when_tests_are_collected": (0, 3),
    "pytest_plugin/test_plugin.py::test_bad_options_are_usage_errors": (0, 2, 7),
    "report/test_merging.py::test_a_report_that_was_edited_is_refused": (),
    "report/test_merging.py::test_a_shard_that_is_missing_is_said_and_red": (),
    "report/test_merging.py::test_all_shards_together_are_one_session_on_the_same_blocks_bit_for_bit": (),  # its file
    "report/test_merging.py::test_reports_of_other_sessions_code_or_content_are_refused": (),
    "report/test_merging.py::test_the_command_reports_all_of_it_and_writes_it": (),
    "session/test_judge.py::test_findings_are_confirmed_before_they_are_told": (),  # session/test_run.py
    "session/test_run.py::test_a_planted_fault_is_found_by_the_law_that_must_catch_it": (),  # laws/
    "simulation/test_alone.py::test_it_calls_the_same_where_tensors_have_no_values": (0, 2),
    "simulation/test_alone.py::test_it_calls_what_it_calls_among_all": (0, 5, 11),
    "simulation/test_cuda.py::test_each_substitution_is_counted_by_its_name": tuple(range(0, 35, 2)),
    "simulation/test_search.py::test_an_order_that_fails_is_found_with_the_decisions_it_needs_and_is_had_again": (
        1,
        2,
        3,
    ),
    "simulation/test_smaller_worlds.py::test_the_smallest_world_that_fails_alike": (0, 1, 2),
    "simulation/test_thread_order.py::test_two_threads_whose_calls_share_an_order_are_found_with_the_threads_and_lines": (  # noqa: E501
        0,
        2,
        4,
    ),
    "strategies/test_of_tests.py::test_what_fails_shrinks_to_the_smallest": (),  # its file
    "strategies/test_strategies.py::test_each_family_shrinks_to_its_smallest_model": (1, 3, 5),
    "strategies/test_strategies.py::test_larger_worlds_have_cases_and_shrink_to_their_smallest": (0, 4),
    "strategies/test_strategies.py::test_what_is_drawn_of_a_space": (0,),
    "strategies/test_strategies.py::test_what_is_not_accepted_is_never_drawn": tuple(range(0, 57, 4)),
    "studies/claims/test_document.py::test_the_document_says_what_is_measured": _all_but(46, 5, 13, 15, 16, 19, 20, 24),
    "studies/claims/test_rows.py::test_a_planted_fault_refutes_the_claim": _all_but(14, 1, 9),
    "studies/faults/test_matrix.py::test_every_law_is_asked_where_all_are_wanted": (),  # its file
    "studies/test_power.py::test_effective_errors_are_found_and_no_honest_run_accused": (1, 3),
    "torch_suite/test_torch_suite.py::test_a_handful_passes_on_simulated_ranks": (),  # engines/
    "workload/test_clip_groups.py::test_a_fault_of_grouping_is_found": (),  # the laws hold by group
    "workload/test_clip_groups.py::test_the_laws_hold_by_group": (14,),
    "workload/test_example_models.py::test_norms_turns_and_experts_that_are_spelled_out_are_exact": (3,),
    "workload/test_example_models.py::test_the_small_gpt_holds": (1,),
    "workload/test_own_optimizer.py::test_a_right_optimizer_holds": (1,),
    "workload/test_own_optimizer.py::test_an_implementation_that_trains_other_tensors_is_not_supported": (),  # its file
    "workload/test_projection.py::test_without_local_tensors_several_steps_are_the_single_devices": (0, 3),
}
"""Test, below tests/ -> the rows that run by day."""


def by_night(items: Iterable[pytest.Item]) -> None:
    """Mark all other rows."""
    seen: Counter[str] = Counter()
    for item in items:
        _, _, below = item.nodeid.partition("[")[0].rpartition("tests/")
        if below in ROWS:
            if seen[below] not in ROWS[below]:
                item.add_marker(pytest.mark.nightly)
            seen[below] += 1
