"""One kind of probe: given itself or by its dotted name, called at its moments, and what is none is refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fsdpcheck.case import LayerSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import AdapterError
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from fsdpcheck.program.probe import BUILD, Notes, Probe, names_of, probe
from tests.common.cases_by_hand import SMALLEST

HERE = __name__
OWN = TrainingCase(ModelSpec((LayerSpec(1),), units=(1,)), step=StepSpec(steps=2))


@probe(at=(BUILD, "after_init", "before_step"))
def where(seen: Any, notes: Notes) -> tuple[str, bool, int]:
    return notes.moment(), isinstance(seen, nn.Module), notes.step()


@probe(calls="levitates")
def asking(model: nn.Module, notes: Notes) -> None: ...


def no_probe(model: nn.Module, notes: Notes) -> None: ...


def test_a_probe_is_called_with_the_model_and_then_with_the_trainer(engine: SimulatedEngine) -> None:
    run = Run(engine, "reference")
    execution = run(OWN, probes=(where,))
    built = [(BUILD, -1, (BUILD, True, -1)), ("after_init", -1, ("after_init", False, -1))]
    steps = [("before_step", step, ("before_step", False, step)) for step in (0, 1)]
    assert where.saw(execution.ranks[0]) == [*built, *steps]
    assert execution.request.probes == (f"{HERE}:where",)
    assert run(OWN, probes=(f"{HERE}:where",)).ranks[0].observations == execution.ranks[0].observations


def test_a_probe_that_looks_at_every_moment_is_not_called_with_the_model() -> None:
    assert not probes.units.looks_at(BUILD)
    assert probes.units.looks_at("after_forward")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            f"{HERE}:no_probe",
            "is no probe\n  got     function\n  wanted  a function below @fsdpcheck.laws.probe",
        ),
        (f"{HERE}:wher", "has no 'wher'. Did you mean 'where'?"),
        ("fsdpcheck.program.watchers:held", "it is fsdpcheck.program.probes.hooks now"),
        (f"{HERE}:asking", "got     ReferenceTrainer without levitates"),
    ],
)
def test_what_is_no_probe_is_an_error_and_no_finding(engine: SimulatedEngine, name: str, said: str) -> None:
    with pytest.raises(AdapterError) as raised:
        Run(engine, "reference")(SMALLEST, probes=(name,))
    assert said in str(raised.value)


def test_every_probe_of_the_laws_is_found_by_its_name() -> None:
    known = {name: one for name, one in vars(probes).items() if isinstance(one, Probe)}
    assert len(known) == 22
    assert names_of(known.values()) == tuple(f"{one.function.__module__}:{name}" for name, one in known.items())
