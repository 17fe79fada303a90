"""A user's own functions in place of an adapter: right ones hold, wrong ones are found, and others are told."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import get_args

import pytest

from fsdpcheck import adapters
from fsdpcheck.adapters.contract import Promise
from fsdpcheck.case import UserModelSpec
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import AdapterError
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.workload.user_model import inspection

TOYS = str(Path(__file__).parent.parent / "toys" / "own_parts.py")


@functools.cache
def _own() -> UserModelSpec:
    return inspection.inspect(f"{TOYS}:build", f"{TOYS}:batch", "", None).own


def _judged(engine: SimulatedEngine, law: str, parts: str, worlds: tuple[int, ...] = (2, 4), most: int = 6) -> Verdict:
    run = Run(engine, f"{TOYS}:{parts}", own=_own())
    return check_law(chapters()[law], run, world_sizes=worlds, most=most, shrink=False)


@pytest.mark.parametrize(
    ("law", "parts"),
    [
        ("training.plain", "parallelize"),
        ("training.plain", "in_place"),
        ("training.gradients", "ddp,averaging=before"),
        ("training.gradients", "summing,averaging=none"),
        ("rounding.gradients", "summing,averaging=none"),
        ("global-norm.update", "summing,averaging=none,clip=clip"),
        ("training.plain", "on_two_axes,axes=dp_shard+tp"),
        ("training.plain", "parallelize,step=step"),
        ("training.plain", "parallelize,step=syncs_once"),
        ("global-norm.update", "parallelize,clip=clip"),
        ("shards.cover", "parallelize,keeps=shards"),
        ("lifecycle.memory", "parallelize,keeps=units"),
    ],
)
def test_right_functions_hold(law: str, parts: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, law, parts, (2, 3) if "averaging=none" in parts else (2, 4))
    assert (verdict.status, verdict.reason) == ("holds", "")


@pytest.mark.parametrize(
    ("law", "parts", "said"),
    [
        ("training.gradients", "bias_left_out", "model.0.bias"),
        ("training.gradients", "parallelize,averaging=none", "exactly 1/W = 0.5 times the right one"),
        ("training.gradients", "parallelize,step=last_only", "micro-batch"),
        ("global-norm.returned", "parallelize,clip=clip_own_shard", "the global gradient norm is wrong"),
        ("shards.cover", "ddp,averaging=before,keeps=shards", "every rank holds whole parameters"),
        ("lifecycle.memory", "in_one,keeps=units", "units stay gathered"),
    ],
)
def test_a_wrong_function_is_found(law: str, parts: str, said: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, law, parts, worlds=(2,), most=20)
    assert verdict.status == "finding"
    assert verdict.finding is not None
    assert said in str(verdict.finding)


@pytest.mark.parametrize(
    ("law", "parts", "said"),
    [
        ("training.gradients", "summing", "exactly W = 2 times the right one: added up over the ranks and not"),
        ("training.plain", "one_unit_averaged,averaging=none", "in between: reduce_scatter of 4 at "),
    ],
)
def test_the_smallest_case_tells_what_is_wrong(law: str, parts: str, said: str, engine: SimulatedEngine) -> None:
    """Of the first case that happens to fail more than two causes may be true."""
    run = Run(engine, f"{TOYS}:{parts}", own=_own())
    verdict = check_law(chapters()[law], run, world_sizes=(2,), most=20)
    assert verdict.finding is not None
    assert said in f"{verdict.finding.cause}\n{verdict.finding.stage}"


def test_what_goes_wrong_in_one_unit_is_no_shard_of_the_model(engine: SimulatedEngine) -> None:
    """The last unit's parameters are the last in the model, and lie on every rank."""
    verdict = _judged(engine, "training.plain", "one_unit_averaged,averaging=none", worlds=(2,), most=20)
    assert verdict.finding is not None
    assert "shard" not in verdict.finding.cause


@pytest.mark.parametrize(
    ("law", "parts", "said"),
    [
        ("training.plain", "nothing", "returned nothing and left the model as it was"),
        ("training.plain", "a_list", "returned list"),
        ("training.plain", "parallelize,step=never_steps", "no call of optimizer.step()"),
        ("global-norm.returned", "parallelize,clip=clip_silently", "NoneType"),
    ],
)
def test_a_function_that_breaks_its_protocol_is_told(law: str, parts: str, said: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, law, parts, worlds=(2,), most=3)
    assert verdict.status == "error"
    assert said in verdict.reason


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("parallelize,stp=step", "Did you mean 'step'?"),
        ("parallelize,step", "got     step"),
        ("parallelize,step=no_such", "the step of adapter '"),
        ("parallelize,step=no_such", "has no 'no_such'"),
        ("parallelize,axes=dp_shards+tp", "Did you mean 'dp_shard'?"),
        ("parallelize,averaging=never", "wanted  after, before, none"),
        ("parallelize,keeps=shard", "Did you mean 'shards'?"),
        ("on_two_axes,axes=dp_shard+tp,keeps=shards", "got     a mesh with tp"),
        ("parallelize,clip=OWN_NUMBER", "OWN_NUMBER"),
    ],
)
def test_parts_that_say_nothing_are_refused(parts: str, said: str) -> None:
    with pytest.raises(AdapterError) as told:
        adapters.load(f"{TOYS}:{parts}")
    assert said in str(told.value)


@pytest.mark.parametrize("keeps", ["", ",keeps=shards", ",keeps=units"])
def test_a_promise_not_made_has_a_reason(keeps: str) -> None:
    features = adapters.load(f"{TOYS}:parallelize{keeps}").features
    missing = {*get_args(Promise)} - features.promises
    assert {promise for promise in missing if not features.reason(promise)} == set()


def test_a_factory_without_arguments_is_no_function_of_parts(tmp_path: Path) -> None:
    path = tmp_path / "made.py"
    path.write_text("from fsdpcheck.adapters.builtin import ddp\n\n\ndef make():\n    return ddp.adapter\n")
    assert adapters.load(f"{path}:make").name == "ddp"


def test_what_raises_on_ranks_is_in_the_report_and_not_on_stderr_for_each(
    engine: SimulatedEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    """A hidden layer of 4 is cut into unequal parts by 3 ranks, which DTensor's views do not take."""
    verdict = _judged(engine, "training.plain", "in_halves,axes=tp", worlds=(3,), most=3)
    assert verdict.finding is not None
    assert "must have same reduction dim" in verdict.finding.got
    assert capfd.readouterr().err.count("\n") < 10
