"""Lines that a failing case alone runs: of planted faults, and how many functions are named."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

import pytest

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.execution import Line
from fsdpcheck.judging import own_lines
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.program.lines import Lines

PLAIN = TrainingCase(ModelSpec((LayerSpec(2, bias=True), LayerSpec(2))), step=StepSpec(clipping="probe"))
WITHOUT = replace(PLAIN, model=ModelSpec((LayerSpec(2), LayerSpec(2))))
PARTIAL = replace(
    PLAIN, mesh=MeshSpec(2), layout=BatchLayout("replicated", 2), step=replace(PLAIN.step, contribution="partial")
)


@pytest.mark.parametrize(
    ("fault", "case", "holding", "wanted"),
    [
        ("fsdpcheck.impl.faults:bias_left_out_of_norm", PLAIN, (WITHOUT,), "/impl/norms/linear.py:"),
        (
            "tests.mechanisms.planted:sum_over_ranks_discarded",
            PARTIAL,
            (replace(PARTIAL, step=replace(PARTIAL.step, contribution="complete")), replace(PARTIAL, mesh=MeshSpec(1))),
            " in all_reduce_sum: dist.all_reduce(values, ",
        ),
    ],
)
def test_lines_of_a_planted_fault_are_told(
    fault: str, case: TrainingCase, holding: tuple[TrainingCase, ...], wanted: str, engine: SimulatedEngine
) -> None:
    law = chapters()["clipping.factors"]
    run = Run(engine, "reference", installs=(fault,)).watching(law.observe)
    found = own_lines.of_case(law, run, [case, replace(case, seed=1)], holding)
    assert wanted in found, found
    assert 0 < len(found.splitlines()) <= 3
    assert own_lines.of_case(law, run, [case], [case]) == "", "it runs nothing that it does not run"
    assert own_lines.of_case(law, run, [case, holding[0]], holding) == "", "a failing case does not run them"
    assert own_lines.of_case(law, run, [case], []) == ""
    assert not run.ran.lines, "what is recorded for this is not the run's"


def of_lines(here: Iterable[Line], there: Iterable[Line], monkeypatch: pytest.MonkeyPatch) -> str:
    ran = iter([set(there), set(here)])
    monkeypatch.setattr(own_lines, "_lines", lambda law, run, case: next(ran))
    return own_lines.of_case(None, None, [PLAIN], [WITHOUT])  # type: ignore[arg-type]


def test_lines_in_a_row_are_one_range(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [("a.py", number, "f") for number in (1, 2, 4, 5, 6, 9)]
    assert of_lines(here, [("a.py", 2, "f"), ("b.py", 1, "g")], monkeypatch) == "a.py:1, 4-6, 9 in f"


def test_of_many_functions_the_file_is_named_if_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_lines([("a.py", 1, name) for name in "fghi"], [], monkeypatch) == "4 functions of a.py"
    assert of_lines([("a.py", 1, "f"), *(("b.py", 1, name) for name in "ghi")], [], monkeypatch) == ""


def test_what_traced_the_thread_before_does_so_afterwards() -> None:
    before, found = sys.gettrace(), set[Line]()
    with Lines(found):
        PARTIAL.describe()
        replace(PLAIN, seed=1)
    assert sys.gettrace() is before
    assert not found, "neither the harness nor the standard library is an implementation"
