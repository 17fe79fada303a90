"""Simulated ranks do with one call what gloo does with it, where programs are careless too: bits, or a refusal.

Without the checks of execution/tensor_rules.py each program of a form that does not fit runs through in
simulation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from fsdpcheck import adapters
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import RunRequest
from fsdpcheck.execution.tensor_rules import as_memory
from fsdpcheck.findings.tokens import Token
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.session.run import of_engine, replayed
from fsdpcheck.strategies.enumeration import distinct

FILE = Path(__file__).with_name("programs_for_tests.py")
PROGRAMS = sys.modules[type(adapters.load(f"{FILE}:gather_in_reverse")).__module__].PROGRAMS
WORLD = 3
REFUSED = {
    *("reduce_scatter_of_transposed", "all_reduce_with_gaps", "all_to_all_of_gaps"),
    *("gather_into_too_much", "gather_into_another_dtype", "gather_into_another_shape"),
    *("gather_into_a_short_list", "gather_into_a_long_list"),
    *("reduce_scatter_of_too_much", "reduce_scatter_into_another_dtype"),
    *("gather_uneven_pieces", "sum_premultiplied"),
}


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    both = SimulatedEngine(budget_seconds=100), ProcessesEngine(budget_seconds=100)
    yield both
    for engine in both:
        engine.close()


def outcome(engine: Engine, name: str) -> object:
    size = 2 if name in REFUSED else WORLD  # after a refusal all ranks are new ones
    layout = BatchLayout("contiguous", size)
    case = TrainingCase(ModelSpec((LayerSpec(1),)), MeshSpec(size), layout, arithmetic=Arithmetic(project=False))
    execution = engine.run(RunRequest(case, f"{FILE}:{name}"))
    if execution.failure is not None:
        return execution.failure.kind, execution.failure.exception
    return [result.steps[0].params["result"].tolist() for result in execution.ranks]


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_engines_make_the_same_of_a_call(engines: tuple[Engine, Engine], name: str) -> None:
    simulated, gloo = (outcome(engine, name) for engine in engines)
    assert simulated == gloo
    if name.endswith("_in_reverse") and TorchVersion(torch.__version__) < (2, 13):
        return  # 2.11 makes something else of ranks in reverse order, and both engines the same
    refusal = "raised", "ValueError" if name == "all_to_all_of_gaps" else "RuntimeError"
    assert simulated == refusal if name in REFUSED else isinstance(simulated, list)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_memory_is_read_in_its_own_order(order: tuple[int, ...]) -> None:
    tensor = torch.arange(24.0).reshape(2, 3, 4).permute(order)
    assert torch.equal(as_memory(tensor).flatten(), torch.arange(24.0))
    assert as_memory(tensor).shape == tensor.shape


def test_the_law_of_agreement_holds_on_real_ranks_and_is_not_asked_without(engines: tuple[Engine, Engine]) -> None:
    simulated, real = engines
    law = chapters()["collectives.on-real-ranks"]
    unasked = check_law(law, Run(simulated, "fully_shard"), most=2)
    assert (unasked.status, unasked.cases, unasked.exit_code) == ("not asked", 0, 0)
    assert "--engine processes" in unasked.reason
    asked = check_law(law, Run(real, "fully_shard"), world_sizes=(2,), most=2)
    assert (asked.status, asked.cases) == ("holds", 2)


def test_a_session_on_simulated_ranks_does_not_choose_it() -> None:
    laws = [chapters()[name] for name in ("collectives.plain", "collectives.on-real-ranks")]
    assert [one.name for one in of_engine(laws, "simulated")] == ["collectives.plain"]
    assert of_engine(laws, "processes") == laws == of_engine(laws, "torchrun")
    with pytest.raises(UsageError, match="none is asked on simulated ranks"):
        of_engine(laws[1:], "simulated")
    case = next(iter(distinct(laws[1].draw(Run(SimulatedEngine(), "ddp").features, (2,)), 1)))
    with pytest.raises(UsageError, match="none is asked on simulated ranks"):
        replayed(Token(laws[1].name, "ddp", case), "simulated")


@pytest.mark.parametrize(("kind", "ended"), [("simulated", {"skipped": 1}), ("processes", {"passed": 1})])
def test_pytest_asks_it_on_real_ranks(kind: str, ended: dict[str, int], pytester: pytest.Pytester) -> None:
    pytester.makepyfile("from fsdpcheck.properties.test_collectives import test_real_ranks_do_what_simulated_ones_do")
    ran = pytester.runpytest_subprocess(
        "--fsdpcheck-adapter", "ddp", "--fsdpcheck-engine", kind, "-p", "no:cacheprovider"
    )
    ran.assert_outcomes(**ended)
    assert ran.ret == 0
