"""Functions that compute in another dtype: judged by what is said of it, refused where nothing is."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from fsdpcheck import adapters
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import AdapterError
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging import check
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.workload.user_model import inspection
from fsdpcheck.workload.user_model.inspection import Seen

TOYS = Path(__file__).parent.parent / "toys"
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
with_examples = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="only a checkout has the examples")
MODEL, PARTS = str(TOYS / "own_parts.py"), str(TOYS / "own_precision.py")
SAID, AUTOCAST = "param-dtype=bfloat16,reduce-dtype=float32", "param-dtype=autocast"


@functools.cache
def _seen(model: str = MODEL) -> Seen:
    return inspection.inspect(f"{model}:build", f"{model}:batch", "", None)


def _judged(
    engine: SimulatedEngine, law: str, parts: str, most: int = 4, on_own_model: bool = True, model: str = MODEL
) -> Verdict:
    run = Run(engine, f"{PARTS}:{parts}")
    run = run.of(_seen(model), False) if on_own_model else run
    return check_law(chapters()[law], run, world_sizes=(2, 4), most=most, shrink=False)


def _of_an_example(engine: SimulatedEngine, law: str, parts: str, name: str, most: int = 4) -> Verdict:
    said = AUTOCAST if "step=" in parts else SAID
    return _judged(engine, law, f"{parts},{said}", most, model=str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize("law", ["training.plain", "training.gradients", "global-norm.update"])
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param("full", marks=pytest.mark.nightly),
        f"mixed,{SAID}",
        f"ddp,averaging=before,step=step,{AUTOCAST}",
        pytest.param("in_float32,param-dtype=float32", marks=pytest.mark.nightly),
        pytest.param("reduced_in_float32,reduce-dtype=float32", marks=pytest.mark.nightly),
        pytest.param("only_float32,param-dtype=float32", marks=pytest.mark.nightly),
    ],
)
def test_what_is_said_and_done_holds(law: str, parts: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, law, parts)
    clips = law == "global-norm.update" and "step=" in parts
    assert verdict.status == ("not promised" if clips else "holds")


@with_examples
@pytest.mark.parametrize(
    ("law", "parts", "name"),
    [
        ("training.gradients", "blocks_mixed", "small_llama"),
        pytest.param("global-norm.update", "blocks_mixed", "small_llama", marks=pytest.mark.nightly),
        pytest.param("training.plain", "blocks_mixed", "small_gpt", marks=pytest.mark.nightly),
        pytest.param("training.plain", "blocks_mixed", "small_moe", marks=pytest.mark.nightly),
        pytest.param("training.gradients", "blocks_mixed", "small_vit", marks=pytest.mark.nightly),
        pytest.param("training.gradients", "ddp,averaging=before,step=step", "small_llama", marks=pytest.mark.nightly),
    ],
)
def test_a_transformer_in_a_policy_of_its_own_holds(law: str, parts: str, name: str, engine: SimulatedEngine) -> None:
    """Its norms and embeddings of positions in float32, its functions off the grid on whole numbers."""
    verdict = _of_an_example(engine, law, parts, name)
    assert (verdict.status, verdict.reason) == ("holds", "")


@with_examples
@pytest.mark.parametrize("name", ["small_gpt", "small_vit"])
def test_of_one_that_names_no_dtype_cases_are_in_float32_all_the_same(name: str, engine: SimulatedEngine) -> None:
    """Where the model computes in that, it has too few bits: a policy has grids of its own."""
    seen = _seen(str(EXAMPLES / f"{name}.py"))
    accepted = {
        parts: Run(engine, f"{PARTS}:{parts}").of(seen, False).features.accepts
        for parts in ("blocks_mixed", f"blocks_mixed,{SAID}")
    }
    assert ["float32" in accepts for accepts in accepted.values()] == [False, True]
    assert not set(seen.own.traits) - accepted[f"blocks_mixed,{SAID}"]


@with_examples
@pytest.mark.parametrize(
    ("parts", "said", "name"),
    [
        ("blocks_summed_in_bfloat16", "bfloat16", "small_llama"),
        pytest.param("blocks_summed_in_bfloat16", "bfloat16", "small_vit", marks=pytest.mark.nightly),
        ("blocks_averaged_twice", "the gradient is not the single device's", "small_llama"),
        pytest.param("blocks_stale", "the gradient is not the", "small_llama", marks=pytest.mark.nightly),
    ],
)
def test_what_is_wrong_with_it_is_found_there(parts: str, said: str, name: str, engine: SimulatedEngine) -> None:
    verdict = _of_an_example(engine, "training.gradients", parts, name, most=12)
    assert verdict.status == "finding"
    assert verdict.finding is not None
    assert said in f"{verdict.finding.what}; {verdict.finding.cause}"


def test_only_of_a_users_model_in_few_bits_such_sums_must_occur(engine: SimulatedEngine) -> None:
    runs = [Run(engine, f"{PARTS}:mixed,{SAID}"), Run(engine, f"{PARTS}:mixed")]
    runs = [*runs, *(run.of(_seen(), False) for run in runs)]
    assert [check._limits(run, (1, 2)).few_bits for run in runs] == [False, False, True, False]


def test_a_model_without_a_case_in_few_bits_is_not_sent_to_real_numbers(engine: SimulatedEngine) -> None:
    """Nobody judges them there: the word that asks for few bits is in the way."""
    toys = TOYS / "few_bits_models.py"
    seen = inspection.inspect(f"{toys}:mask_of_many_bits", f"{toys}:batch")
    run = Run(engine, f"{PARTS}:mixed_units,{SAID}").of(seen, False)
    verdict = check_law(chapters()["training.gradients"], run, world_sizes=(1,), most=4, shrink=False)
    assert (verdict.status, verdict.exit_code) == ("no case", 2)
    assert "next    leave --param-dtype out" in verdict.reason


def test_functions_that_take_no_float64_are_judged_on_a_model_that_names_no_dtype(engine: SimulatedEngine) -> None:
    """In float32 it has few bits to spend, which is no reason to ask nothing of it."""
    verdict = _judged(engine, "training.gradients", "only_float32,param-dtype=float32")
    assert (verdict.status, verdict.reason) == ("holds", "")
    assert verdict.census["float32"] == verdict.cases


def test_autocast_may_be_opened_in_the_forward_of_what_is_parallel(engine: SimulatedEngine) -> None:
    assert _judged(engine, "training.gradients", f"wrapped,averaging=before,{AUTOCAST}").status == "holds"


def test_a_step_in_bfloat16_is_not_asked_to_clip() -> None:
    features = adapters.load(f"{PARTS}:ddp,averaging=before,step=step,{SAID}").features
    assert "your own step is not asked to clip" in chapters()["global-norm.update"].not_promised(features)


@pytest.mark.parametrize("law", ["precision.training", "training.gradients"])
def test_models_of_fsdpcheck_are_judged_in_it_too(law: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, law, f"mixed_units,{SAID}", on_own_model=False)
    assert (verdict.status, verdict.reason) == ("holds", "")


@pytest.mark.parametrize(
    ("law", "parts", "said"),
    [
        ("training.gradients", f"summed_in_bfloat16,{SAID}", "bfloat16"),
        ("training.plain", f"mixed,step=step_kept,{SAID}", "the parameters are not the single device's"),
    ],
)
def test_what_is_rounded_besides_is_found(law: str, parts: str, said: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, law, parts, most=30)
    assert verdict.status == "finding"
    assert verdict.finding is not None
    assert said in f"{verdict.finding.what}; {verdict.finding.cause}"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("mixed", "--param-dtype bfloat16 --reduce-dtype float32"),
        ("ddp,averaging=before,step=step", "say so: --param-dtype autocast"),
        (f"ddp,averaging=before,step=step,{SAID}", "say so: --param-dtype autocast"),
        (f"wrapped,averaging=before,{SAID}", "opens it by itself, leave --param-dtype out"),
        (f"mixed,{AUTOCAST}", "say so: --param-dtype bfloat16 --reduce-dtype float32"),
        (f"full,{AUTOCAST}", "run the model under torch.autocast, or leave --param-dtype out"),
        ("in_float32", "--param-dtype float32"),
        ("reduced_in_float32", "--reduce-dtype float32"),
        ("reduced_in_bfloat16", "reduce in bfloat16, and nothing says so"),
        ("compressed,averaging=before", "reduce in bfloat16, and nothing says so"),
        (f"all_in_bfloat16,{SAID}", "reduce in bfloat16, and float32 is what was said"),
        (f"full,{SAID}", "pass the policy, or leave --param-dtype out"),
    ],
)
def test_what_is_not_said_or_not_done_is_refused(parts: str, said: str, engine: SimulatedEngine) -> None:
    """Neither a finding, for nobody has promised float64, nor a pass of what was never run."""
    verdict = _judged(engine, "training.gradients", parts, most=15)
    assert (verdict.status, verdict.exit_code) == ("error", 2)
    assert said in verdict.reason


@pytest.mark.parametrize("law", ["precision.training", "precision.gradients"])
def test_no_law_of_low_precision_is_asked_where_nothing_is_said(law: str) -> None:
    assert "bfloat16" in chapters()[law].not_promised(adapters.load(f"{PARTS}:full").features)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("mixed,param-dtype=bfloat16", "--reduce-dtype float32"),
        ("mixed,param-dtype=bfloat61", "Did you mean 'bfloat16'?"),
        ("mixed,param-dtype=float16", "wanted  float32, bfloat16, autocast"),
        ("mixed,param-dtype=bfloat16,reduce-dtype=bfloat16", "wanted  float32"),
    ],
)
def test_dtypes_of_which_nothing_is_exact_are_refused(parts: str, said: str) -> None:
    with pytest.raises(AdapterError) as told:
        adapters.load(f"{PARTS}:{parts}")
    assert said in str(told.value)
