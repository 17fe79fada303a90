"""What an adapter promises and does not have is its own mistake, never a finding: every promise, every observable."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import pytest

from fsdpcheck import adapters, cli
from fsdpcheck.adapters.vocabulary import OBSERVABLES, PROMISES
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import USAGE, AdapterError
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from fsdpcheck.program.probe import Probe
from tests.common.tables import each
from tests.toys import lacking

TOY = str(Path(lacking.__file__))
LAWS = {
    "parameters": "training.plain",
    "gradients": "rounding.gradients",
    "norms": "clipping.norms",
    "factors": "clipping.factors",
    "grad_norm": "global-norm.returned",
    "shards": "padding.zero",
    "units": "lifecycle.aliased",
    "ordered_norms": "norms.dataset-order",
    "local_tensors": "shards.cover",
    "save": "state.resumed",
    "load": "state.resumed",
    "accounted": "privacy.accounted",
    "thaw": "training.thawed",
}
"""A method of trainers -> a law that calls it."""
PROBES = [one for one in vars(probes).values() if isinstance(one, Probe)]
ASKED = {one.calls for one in PROBES} - {""}


def test_every_probe_names_the_method_that_it_calls() -> None:
    for one in PROBES:
        source = ast.parse(textwrap.dedent(inspect.getsource(one.function)))
        calls = [node.func for node in ast.walk(source) if isinstance(node, ast.Call)]
        found = {f.attr for f in calls if isinstance(f, ast.Attribute) and ast.unparse(f.value) == "trainer"}
        assert found == {one.calls} - {""}, one.name


def test_every_method_is_tried() -> None:
    assert set(LAWS) == set(lacking.OF_TRAINERS) == {*OBSERVABLES.values(), *ASKED, "save", "load", "thaw"}
    assert set(lacking.OF_ADAPTERS) == {name for row in PROMISES.values() for name in row.adapter}


@pytest.mark.nightly
@each(("method", "law"), LAWS.items(), ids=LAWS)
def test_a_trainer_without_what_is_promised_is_no_finding(engine: SimulatedEngine, method: str, law: str) -> None:
    verdict = check_law(chapters()[law], Run(engine, f"{TOY}:{method}"), world_sizes=(2,), most=1, shrink=False)
    assert (verdict.status, verdict.exit_code) == ("error", USAGE)
    for said in ("lacks a method", f"ReferenceTrainer without {method}", "wanted ", "next "):
        assert said in verdict.reason


@pytest.mark.parametrize("method", lacking.OF_ADAPTERS)
def test_an_adapter_without_what_is_promised_is_refused(method: str) -> None:
    with pytest.raises(AdapterError, match=f"got     Lacking without {method}\n  wanted  .*\n  next    ") as refused:
        adapters.load(f"{TOY}:{method}")
    promise = next(name for name in sorted(PROMISES) if method in PROMISES[name].adapter)
    assert f"promises {promise!r}, which it contradicts" in str(refused.value)


@pytest.mark.parametrize("promise", [name for name, row in PROMISES.items() if row.promises])
def test_a_promise_without_those_that_it_rests_on_is_refused(tmp_path: Path, promise: str) -> None:
    path = tmp_path / "alone.py"
    path.write_text(
        "from fsdpcheck.adapters.contract import Features\n\nclass Alone:\n"
        f"    name, features = 'alone', Features(promises=frozenset({{{promise!r}, 'plain'}}))\n"
        "    def build(self, model, setup): ...\n"
        "    def stored(self, folder): ...\n"
        "    def read(self, folder, model): ...\n"
    )
    with pytest.raises(AdapterError, match=f"got     promises without {PROMISES[promise].promises[0]}"):
        adapters.load(f"{path}:Alone")


def test_exact_factors_of_nested_norms_are_a_contradiction(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--adapter", f"{TOY}:Nested", "--law", "training.plain", "--world-size", "1"]) == USAGE
    said = capsys.readouterr()
    for words in ("promises 'exact-factors'", "nested=True", "wanted  factors of the root of one squared norm", "next"):
        assert words in said.out + said.err


def test_norms_that_are_no_tensor_are_no_finding(engine: SimulatedEngine) -> None:
    verdict = check_law(
        chapters()["clipping.norms"], Run(engine, f"{TOY}:Lists"), world_sizes=(1,), most=1, shrink=False
    )
    assert (verdict.status, verdict.exit_code) == ("error", USAGE)
    assert "norms() of adapter 'reference' returned no tensor\n  got     list" in verdict.reason
