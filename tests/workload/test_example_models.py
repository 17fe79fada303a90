"""The models of docs/examples hold: small ones of ordinary modules, and those of transformers where it is installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdpcheck import oracle
from fsdpcheck.case import Arithmetic, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.engines.base import Engine
from fsdpcheck.errors import NotExact
from fsdpcheck.findings import faults
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import certificate
from fsdpcheck.workload.losses import OwnLoss, Reduction
from fsdpcheck.workload.user_model import inspection

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LAWS = [
    ("fully_shard", "training.plain", "tier exact"),
    ("reference", "clipping.sum", "tier exact"),
    ("fully_shard", "rounding.gradients", "tier replay"),
]
"""A plain and a private law on integers, and one on the model's own weights."""

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="only a checkout has the examples")


def _judged(
    engine: Engine, model: str, adapter: str, law: str, *installs: str, build: str = "build", batch: str = "batch"
) -> Verdict:
    """The law on two cases of the example's model, on two ranks, with these faults planted."""
    file = EXAMPLES / f"{model}.py"
    seen = inspection.inspect(f"{file}:{build}", f"{file}:{batch}")
    run = Run(engine, adapter, tuple(map(faults.resolved, installs))).of(seen, law.startswith("rounding."))
    return check_law(chapters()[law], run, world_sizes=(2,), most=2, shrink=False)


@pytest.mark.parametrize(("adapter", "law", "tier"), LAWS)
def test_the_small_gpt_holds(adapter: str, law: str, tier: str, engine: Engine) -> None:
    verdict = _judged(engine, "small_gpt", adapter, law)
    assert (verdict.status, verdict.cases, verdict.reason) == ("holds", 2, "")
    assert verdict.census[tier] == 2


@pytest.mark.parametrize("law", [pytest.param("clipping.sum", marks=pytest.mark.nightly), "rounding.gradients"])
def test_a_fault_is_found_on_the_small_gpt(law: str, engine: Engine) -> None:
    verdict = _judged(engine, "small_gpt", "reference", law, "averaged_twice")
    assert verdict.status == "finding"


@pytest.mark.parametrize(("adapter", "law", "tier"), [*LAWS, ("reference", "features.checkpointing", "tier exact")])
def test_gpt2_of_transformers_holds(adapter: str, law: str, tier: str, engine: Engine) -> None:
    pytest.importorskip("transformers")
    verdict = _judged(engine, "gpt2", adapter, law)
    assert (verdict.status, verdict.cases, verdict.reason) == ("holds", 2, "")
    assert verdict.census[tier] == 2


@pytest.mark.parametrize("adapter", [pytest.param("fully_shard", marks=pytest.mark.nightly), "reference"])
@pytest.mark.parametrize("model", ["small_llama", "small_moe", "small_vit"])
def test_patches_norms_turns_and_experts_are_exact(model: str, adapter: str, engine: Engine) -> None:
    verdict = _judged(engine, model, adapter, "training.plain")
    assert (verdict.status, verdict.cases, verdict.reason) == ("holds", 2, "")
    assert verdict.census["tier exact"] == 2


@pytest.mark.parametrize("adapter", ["reference", pytest.param("reference_fsdp2", marks=pytest.mark.nightly)])
def test_private_steps_of_what_is_spelled_out_are_exact(adapter: str, engine: Engine) -> None:
    """Layers of a class of their own are run again, one sample at a time, past all hooks."""
    verdict = _judged(engine, "small_llama", adapter, "training.private-gradients")
    assert (verdict.status, verdict.cases, verdict.reason) == ("holds", 2, "")
    assert verdict.census["tier exact"] == 2


@pytest.mark.nightly
def test_a_fault_of_clipping_is_found_on_them(engine: Engine) -> None:
    verdict = _judged(engine, "small_llama", "reference", "training.private-gradients", "averaged_twice")
    assert verdict.status == "finding"


def test_a_private_case_that_does_not_say_that_it_is_spelled_out_is_refused() -> None:
    """So are those of tokens from before the trait: an implementation may know a formula of the layer."""
    file = EXAMPLES / "small_llama.py"
    own = inspection.inspect(f"{file}:build", f"{file}:batch").own
    assert "spelled-out-private" in own.traits
    less = replace(own, traits=tuple(trait for trait in own.traits if trait != "spelled-out-private"))
    case = TrainingCase(ModelSpec((), own=less), step=StepSpec("cross_entropy", clipping="unclipped"))
    with pytest.raises(NotExact, match="per-sample gradients of layers that spell out cosine, inverse_root"):
        certificate.prove(case, oracle.answer(case))


def test_in_low_precision_samples_weigh_differently_whatever_their_first_target_is() -> None:
    """That may be a token that begins every text, or one of a prompt, which no loss counts."""
    file = EXAMPLES / "small_llama.py"
    own = inspection.inspect(f"{file}:build", f"{file}:batch").own
    outputs, targets = torch.zeros(2, own.features), torch.zeros(2, own.targets)
    targets[1, -1] = 1  # of outputs that are all alike every target has the same loss
    even, odd = OwnLoss(own, spread=True)(outputs, targets).tolist()
    assert odd == 2**8 * even > 0
    assert len(set(OwnLoss(own)(outputs, targets).tolist())) == 1


def test_a_case_in_low_precision_without_any_gradient_shows_nothing() -> None:
    file = EXAMPLES / "small_vit.py"
    own = replace(inspection.inspect(f"{file}:build", f"{file}:batch").own, gauge=False)
    numbers = Arithmetic("float32", inputs=1, weights=1, project=False, compute="bfloat16")
    case = TrainingCase(ModelSpec((), own=own), step=StepSpec("cross_entropy"), arithmetic=numbers)
    answer = oracle.answer(case)
    none = [replace(step, used={k: torch.zeros_like(v) for k, v in step.used.items()}) for step in answer.steps]
    with pytest.raises(NotExact, match="every gradient of your model is 0, which shows nothing"):
        certificate.prove(case, replace(answer, steps=tuple(none)))


@pytest.mark.parametrize("model", ["small_llama", pytest.param("small_moe", marks=pytest.mark.nightly)])
def test_a_fault_is_found_on_them(model: str, engine: Engine) -> None:
    verdict = _judged(engine, model, "reference", "training.plain", "summed_not_averaged")
    assert verdict.status == "finding"
    assert verdict.census["tier exact"] >= 1


@pytest.mark.parametrize("model", ["small_llama", "small_moe", "small_vit"])
def test_a_gradient_gets_to_every_parameter_of_them(model: str) -> None:
    """Of drawn weights, in a few cases together: else whatever is done to the parameter would hold."""
    file = EXAMPLES / f"{model}.py"
    own = inspection.inspect(f"{file}:build", f"{file}:batch").own
    alive: dict[str, bool] = {}
    for seed in range(4):
        case = TrainingCase(ModelSpec((), own=own), step=StepSpec("cross_entropy"), seed=seed)
        for name, gradient in oracle.answer(case).steps[0].gradients.items():
            alive[name] = alive.get(name, False) or bool(gradient.any())
    assert [name for name, found in alive.items() if not found] == []


@pytest.mark.parametrize("build", ["llama", "qwen3", "qwen2_moe", "mixtral", "vit"])
def test_models_of_transformers_are_exact(build: str, engine: Engine) -> None:
    pytest.importorskip("transformers")
    batch = "images" if build == "vit" else "batch"
    verdict = _judged(engine, "of_transformers", "fully_shard", "training.plain", build=build, batch=batch)
    assert (verdict.status, verdict.cases, verdict.reason) == ("holds", 2, "")
    assert verdict.census["tier exact"] == 2


def test_a_fault_is_found_on_the_llama_of_transformers(engine: Engine) -> None:
    pytest.importorskip("transformers")
    verdict = _judged(engine, "of_transformers", "reference", "training.plain", "summed_not_averaged", build="llama")
    assert verdict.status == "finding"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_ones_own_is_watched_however_it_is_reduced(reduction: Reduction) -> None:
    """A probe sees at the loss which rows arrived; adapters that average call the reduced one."""
    file = EXAMPLES / "small_vit.py"
    own = inspection.inspect(f"{file}:build", f"{file}:batch").own
    seen: list[int] = []
    loss = OwnLoss(own)
    loss.register_forward_hook(lambda _, given, losses: seen.append(len(given[0])))
    outputs, targets = torch.zeros(3, own.features), torch.zeros(3, own.targets)
    loss.with_reduction(reduction)(outputs, targets)
    assert seen == [3]
