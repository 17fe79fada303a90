"""A user's own save and load: right ones hold, on other numbers of ranks too, and each planted fault is found."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from fsdpcheck import adapters
from fsdpcheck.case import UserModelSpec
from fsdpcheck.cli import main
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import AdapterError
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.workload.user_model import inspection

TOYS = Path(__file__).parent.parent / "toys"
MODEL, PARTS = str(TOYS / "own_parts.py"), str(TOYS / "own_checkpoints.py")


@functools.cache
def _own() -> UserModelSpec:
    return inspection.inspect(f"{MODEL}:build", f"{MODEL}:batch", "", None).own


def _judged(engine: SimulatedEngine, law: str, parts: str, worlds: tuple[int, ...], most: int) -> Verdict:
    run = Run(engine, f"{PARTS}:{parts}", own=_own())
    return check_law(chapters()[law], run, world_sizes=worlds, most=most, shrink=False)


@pytest.mark.parametrize("law", ["state.resumed", "state.resharded"])
@pytest.mark.parametrize(
    "parts",
    [
        "parallelize,save=save,load=load",
        pytest.param("parallelize,save=save_whole,load=load_whole", marks=pytest.mark.nightly),
        pytest.param("ddp,averaging=before,save=save,load=load", marks=pytest.mark.nightly),
    ],
)
def test_right_functions_hold(law: str, parts: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, law, parts, (1, 2, 4), most=3)
    assert (verdict.status, verdict.reason) == ("holds", "")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("save=save,load=load_no_optimizer", "the optimizer's state"),
        ("save=save,load=load_no_counter", "of the optimizer's state step did not come back"),
        ("save=save,load=load_no_rate", "went on otherwise"),
        ("save=save_moments_of_rank_0,load=load_moments_of_rank_0", "went on otherwise"),
        ("save=save_own_shard,load=load_own_shard", "what was loaded is not what was saved"),
    ],
)
def test_a_wrong_function_is_found(parts: str, said: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, "state.resumed", f"parallelize,{parts}", (2,), most=20)
    assert verdict.status == "finding"
    assert verdict.finding is not None
    assert said in f"{verdict.finding.what}; {verdict.finding.cause}"


def test_a_function_that_fills_an_ordinary_model_is_judged(engine: SimulatedEngine) -> None:
    parts = "parallelize,save=save,load=load"
    assert _judged(engine, "state.readable", parts, (2,), most=3).status == "not promised"
    assert _judged(engine, "state.readable", f"{parts},read=read", (1, 2), most=3).status == "holds"
    verdict = _judged(engine, "state.readable", f"{parts},read=read_no_last", (1, 2), most=3)
    assert verdict.finding is not None
    assert "parameters are in no file of the checkpoint, or are not read" in verdict.finding.cause
    raised = _judged(engine, "state.readable", f"{parts},read=read_no_file", (1, 2), most=3)
    assert raised.finding is not None
    assert raised.finding.what == "an unsharded model cannot be filled"
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'FOLDER/model.pt'" in raised.finding.got
    assert "own_checkpoints.py:" in raised.finding.got


def test_functions_for_as_many_ranks_are_asked_for_no_others(engine: SimulatedEngine) -> None:
    parts = "parallelize,save=save_by_rank,load=load_by_rank,load-at=same"
    assert _judged(engine, "state.resumed", parts, (2,), most=3).status == "holds"
    assert _judged(engine, "state.resharded", parts, (1, 2, 4), most=3).status == "not promised"


@pytest.mark.nightly
def test_functions_for_as_many_ranks_may_say_so_by_themselves(engine: SimulatedEngine) -> None:
    parts = "parallelize,save=save_by_rank,load=load_by_rank"
    verdict = _judged(engine, "state.resharded", parts, (1, 2, 4), most=3)
    assert (verdict.status, verdict.exit_code) == ("not supported", 2)
    assert "a checkpoint is read by as many ranks as wrote it" in verdict.reason


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("parallelize,save=save", "--load"),
        ("parallelize,load=load", "--save"),
        ("parallelize,read=read", "--save, --load"),
        ("parallelize,save=save,load=load,load-at=sme", "Did you mean 'same'?"),
    ],
)
def test_half_a_checkpoint_is_refused(parts: str, said: str) -> None:
    with pytest.raises(AdapterError) as told:
        adapters.load(f"{PARTS}:{parts}")
    assert said in str(told.value)


def test_without_functions_the_laws_of_checkpoints_say_what_names_them() -> None:
    features = adapters.load(f"{PARTS}:parallelize").features
    assert "--save and --load" in chapters()["state.resumed"].not_promised(features)


def test_the_command_line_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    of = ["--model", f"{MODEL}:build", "--batch", f"{MODEL}:batch", "--parallelize", f"{PARTS}:parallelize"]
    assert main(["run", *of, "--save", "save", "--load-at", "same"]) == 2
    assert "name the other one too: --load" in capsys.readouterr().out
