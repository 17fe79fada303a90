"""Which rows of a long test run by day: some that stand for the others, all of which run by night.

A row is given by its number in the order of collection. Where a test has none by day, another one, which is named, sees
by day what it is about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import pytest

ROWS: Final[dict[str, tuple[int, ...]]] = {
    "adapters/test_adapters.py::test_plain_training_is_exact_for_each_accepted_trait": (0,),  # the main job: the others
    "adapters/test_user_checkpoints.py::test_a_wrong_function_is_found": (0, 2),
    "adapters/test_user_parts.py::test_right_functions_hold": (0, 3),
    "adapters/test_user_precision.py::test_what_is_not_said_or_not_done_is_refused": (0, 4, 7),
    "adapters/test_user_precision.py::test_what_is_rounded_besides_is_found": (1,),
    "adapters/test_user_precision.py::test_what_is_said_and_done_holds": (0, 1),
    "adapters/test_user_private.py::test_a_right_step_holds": (0, 3),
    "adapters/test_user_private.py::test_a_wrong_step_is_found": (0, 1, 5),
    "checks/test_initial_parameters.py::test_real_ranks_start_from_rank_0s_values_too": (0,),
    "cli/test_compare.py::test_a_mistake_about_ranks_is_found_and_named": (0, 1),
    "cli/test_coverage.py::test_what_no_case_reached_is_named_and_nothing_else": (1,),
    "cli/test_gate.py::test_what_is_judged_no_more_is_red": (0, 3, 5),
    "comparison/test_reproducer.py::test_a_program_shows_the_mistake_and_ends_by_0_on_the_right_script": (0,),
    "comparison/test_reproducer.py::test_what_no_program_can_show_is_named": (0, 1, 2),
    "engines/test_agreement.py::test_both_engines_make_the_same_of_a_call": tuple(range(0, 24, 2)),
    "engines/test_processes.py::test_a_worker_that_dies_is_a_failure_and_the_next_run_has_new_ones": (0, 3),
    "impl/costs/test_memory.py::test_nothing_as_large_as_a_layer_survives_a_step": (0, 3),
    "judging/test_model_separation.py::test_an_answer_that_is_none_is_no_verdict": (0,),
    "judging/test_one_change.py::test_a_planted_fault_is_told_by_the_change_that_mends_it": (0,),
    "judging/test_unfit.py::test_what_cannot_run_here_is_an_error": (0, 1, 4),
    "judging/test_user_models.py::test_laws_hold_on_a_users_weights": (),  # what_is_wrong_with_clipping_is_found
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
