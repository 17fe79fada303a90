"""Every built-in adapter: one case for each trait it accepts, its declarations kept, its reasons given."""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch

from fsdpcheck import adapters
from fsdpcheck.adapters.contract import Promise
from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    Dtype,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    OptimizerSpec,
    StepSpec,
    TrainingCase,
    Trait,
)
from fsdpcheck.checks.clipping import assert_global_norm, assert_norms_exact
from fsdpcheck.checks.hooks_and_memory import assert_hooks_fire
from fsdpcheck.checks.training import assert_gradients_equal, assert_parameters_equal, assert_ranks_agree
from fsdpcheck.compat import frames_private
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import AdapterError, MissingDependency
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from tests.common.tables import each

W = 2
with_opacus = pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="the extra opacus is missing")

PLAIN = ["reference", "reference_fsdp2", "fully_shard", "fsdp1"]
PRIVATE = ["reference", pytest.param("fsdpcheck.adapters.builtin.opacus:sound", marks=with_opacus)]
ALL = [*PLAIN, pytest.param("opacus", marks=with_opacus)]

TWO = (LayerSpec(2, activation="relu"), LayerSpec(4))
BASE = TrainingCase(
    model=ModelSpec(TWO, features=2, units=(1, 1)),
    mesh=MeshSpec(dp_shard=W),
    layout=BatchLayout("contiguous", 4),
    step=StepSpec(steps=2, normaliser=4),
    arithmetic=Arithmetic(weights=2, inputs=2),
    seed=7,
)


def model(*layers: LayerSpec, units: tuple[int, ...] = (1, 1), **fields: Any) -> TrainingCase:
    return dataclasses.replace(BASE, model=ModelSpec(layers or TWO, features=2, units=units, **fields))


def step(**fields: Any) -> TrainingCase:
    return dataclasses.replace(BASE, step=dataclasses.replace(BASE.step, **fields))


def one_step(dtype: Dtype = "float32", **fields: Any) -> TrainingCase:
    return dataclasses.replace(step(steps=1, **fields), arithmetic=Arithmetic(dtype, project=False))


def optimizer(**fields: Any) -> TrainingCase:
    return step(optimizer=OptimizerSpec(lr_exponent=1, **fields))


def layout(*fields: Any, **named: Any) -> TrainingCase:
    return dataclasses.replace(BASE, layout=BatchLayout(*fields, **named))


CASES: dict[Trait, TrainingCase] = {
    "bias": model(LayerSpec(2, bias=True, activation="relu"), LayerSpec(4, bias=True)),
    "tokens": model(input="tokens", vocabulary=4, length=3, units=(1, 2)),
    "sequence": model(input="sequence", length=3),
    "padding_idx": model(input="tokens", vocabulary=4, length=3, padding_idx=1, units=(2, 1)),
    "layer-norm": model(layer_norm=True, units=(1, 2)),
    "tied": model(LayerSpec(2, activation="relu"), LayerSpec(2), LayerSpec(2), units=(2,), tied=(0, 1)),
    "frozen": model(LayerSpec(2, True, "relu", "weight"), LayerSpec(2, True, "identity", "bias"), units=(1, 1)),
    "root-parameters": model(units=(1,)),
    "keep-unsharded": dataclasses.replace(BASE, mesh=MeshSpec(dp_shard=W, reshard_after_forward=False)),
    "replicated": layout("replicated", 4),
    "ragged": layout("ragged", 4, counts=(3, 1)),
    "empty-rank": layout("ragged", 4, counts=(4, 0)),
    "wrap-around": layout("sampler", 3, shuffle=True),
    "micro-batches": step(micro_batches=2),
    "no-sync": step(micro_batches=2, sync_every=False),
    "mean": step(reduction="mean", normaliser=4),
    "momentum": optimizer(momentum=0.5),
    "weight-decay": optimizer(weight_decay=0.5),
    "adamw": optimizer(kind="adamw"),
    "float32": dataclasses.replace(BASE, arithmetic=Arithmetic("float32")),
    "rows<ranks": model(LayerSpec(1, bias=True), LayerSpec(2)),
    "uneven-rows": model(LayerSpec(3, bias=True, activation="relu"), LayerSpec(5)),
    "project": BASE,
    "premultiply": dataclasses.replace(BASE, arithmetic=Arithmetic("float32", averaging="premultiply")),
    "hsdp": dataclasses.replace(BASE, mesh=MeshSpec(dp_shard=W, dp_replicate=2)),
    "adam": optimizer(kind="adam"),
    "schedule": optimizer(schedule="halving"),
    "resume": step(resume=True, optimizer=OptimizerSpec("adam", 1)),
    "conv": model(LayerSpec(4, kind="conv", kernel=2, padding=1), LayerSpec(2), input="image", length=2),
    "bags": model(input="bags", vocabulary=4, length=3, units=(1, 2)),
    "group-norm": model(LayerSpec(2, True, kind="group_norm"), LayerSpec(2), input="signal", length=4),
    "rms-norm": model(LayerSpec(2, kind="rms_norm"), LayerSpec(2)),
    "layer-norm-without-bias": model(LayerSpec(2, kind="layer_norm"), LayerSpec(2)),
    "attention": model(LayerSpec(2, kind="attention"), LayerSpec(2), input="sequence", length=3),
    "surrogates": model(LayerSpec(2, activation="silu"), LayerSpec(2, activation="softmax")),
    "bfloat16": dataclasses.replace(BASE, arithmetic=Arithmetic("float32", compute="bfloat16")),
    "tf32": dataclasses.replace(BASE, arithmetic=Arithmetic("float32", compute="tf32")),
}
"""One case for each trait: minimal, and with a gradient in every step (test_cases_demand_their_trait)."""


def unclipped(trait: Trait) -> TrainingCase:
    return dataclasses.replace(CASES[trait], step=dataclasses.replace(CASES[trait].step, clipping="unclipped"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = SimulatedEngine()
    yield made
    made.close()


def accepted(ref: str, private: bool = False) -> list[Trait]:
    """The traits whose case the adapter accepts."""
    accepts = adapters.load(ref).features.accepts
    demands = {trait: (unclipped(trait) if private else case).requires() for trait, case in CASES.items()}
    return [trait for trait, needed in demands.items() if needed <= accepts]


@each("trait", CASES)
def test_cases_demand_their_trait(trait: Trait, engine: Engine) -> None:
    case = CASES[trait]
    assert trait in case.requires()
    answer = Run(engine, "reference").answer(case)
    assert all(any(gradient.any() for gradient in step.released.values()) for step in answer.steps)


@pytest.mark.parametrize("ref", PLAIN)
def test_plain_training_is_exact_for_each_accepted_trait(ref: str, engine: Engine) -> None:
    run = Run(engine, ref)

    @each("trait", accepted(ref))
    def exact(trait: Trait) -> None:
        execution, answer = run(CASES[trait], observe={"grads"}), run.answer(CASES[trait])
        assert_parameters_equal(execution, answer)
        assert_gradients_equal(execution, answer)

    exact()


@pytest.mark.parametrize("ref", PRIVATE)
def test_private_training_is_exact_for_each_accepted_trait(ref: str, engine: Engine) -> None:
    run = Run(engine, ref)

    @each("trait", accepted(ref, private=True))
    def exact(trait: Trait) -> None:
        case = unclipped(trait)
        execution, answer = run(case, observe={"grads", "norms"}), run.answer(case)
        assert_parameters_equal(execution, answer)
        assert_gradients_equal(execution, answer)
        assert_norms_exact(execution, answer)

    exact()


@each("trait", ["bias", "frozen", "rows<ranks", "empty-rank", "tied", "uneven-rows"])
@pytest.mark.parametrize("ref", PLAIN)
def test_the_global_norm_is_within_its_bound(ref: str, trait: Trait, engine: Engine) -> None:
    case = CASES[trait]
    step, arithmetic = dataclasses.replace(case.step, max_grad_norm=2.0, steps=1), Arithmetic("float32", project=False)
    case = dataclasses.replace(case, step=step, arithmetic=arithmetic)
    run = Run(engine, ref)
    execution = run(case, observe={"grad_norm"})
    assert_global_norm(execution, run.answer(case), run.features.global_norm)
    assert_ranks_agree(execution)


@pytest.mark.parametrize("ref", ALL)
def test_every_declared_observable_is_delivered(ref: str, engine: Engine) -> None:
    run = Run(engine, ref)
    shown = run.features.observables
    private = "plain" not in run.features.promises
    case = one_step(clipping="unclipped") if private else one_step(max_grad_norm=2.0)
    observe = shown if private else shown - {"norms", "factors"}
    execution = run(case, observe=observe)
    assert execution.failure is None
    names = {"params": "params", "grads": "grads", "norms": "norms", "factors": "factors", "grad_norm": "grad_norm"}
    for record in [record for rank in execution.ranks for record in rank.steps]:
        assert all(getattr(record, names[name]) is not None for name in observe if name in names)
    pickle.dumps(execution)


@pytest.mark.parametrize("ref", ALL)
def test_a_promise_not_made_has_a_reason(ref: str) -> None:
    adapter = adapters.load(ref)
    missing = set(get_args(Promise)) - adapter.features.promises
    assert {promise for promise in missing if not adapter.features.reason(promise)} == set()
    assert adapter.features.reasons.keys() <= missing | {promise.partition(".")[0] for promise in missing}
    assert adapter.features.accepts <= set(get_args(Trait))
    assert adapter.name == ref


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opacus", None)
    monkeypatch.delitem(__import__("sys").modules, "fsdpcheck.adapters.builtin.opacus", raising=False)
    monkeypatch.setattr(adapters, "_loaded", {})
    with pytest.raises(MissingDependency, match=r"fsdpcheck\[opacus\]"):
        adapters.load("opacus")
    assert issubclass(MissingDependency, AdapterError)


@pytest.mark.parametrize("ref", PLAIN)
def test_collectives_know_their_unit(ref: str, engine: Engine) -> None:
    """Gathers and reduce-scatters of two equal units carry two subjects, equal on all ranks."""
    case = model(LayerSpec(2, activation="relu"), LayerSpec(2))
    execution = Run(engine, ref)(case)
    subjects = [[call.subject for call in rank.trace if call.op == "reduce_scatter"] for rank in execution.ranks]
    assert subjects[0] == subjects[1]
    assert len(set(subjects[0])) == 3, subjects[0]
    assert "" not in subjects[0]


class TestSubjectOf:
    def test_of_an_object_with_a_name(self) -> None:
        class Unit:
            fqn = "units.0"

        class Root:
            fqn = ""

        assert frames_private.subject_of(Unit()) == "units.0"
        assert frames_private.subject_of(Root()) == frames_private.ROOT

    def test_of_anything_else(self) -> None:
        class Hostile:
            @property
            def fqn(self) -> str:
                raise RuntimeError("not yet")

        for thing in (None, 3, "units.0", torch.ones(1), torch.nn.Linear(1, 1), Hostile()):
            assert frames_private.subject_of(thing) is None

    def test_of_fsdp1_tells_equal_units_apart(self) -> None:
        class FlatParameter:
            _fqns = ("weight", "bias")

        class FlatParamHandle:
            flat_param = FlatParameter()

            def __init__(self, place: int | None) -> None:
                self._handle_index = place

        assert frames_private.subject_of(FlatParamHandle(None)) == "weight, bias"
        assert frames_private.subject_of(FlatParamHandle(0)) == "unit 0: weight, bias"
        assert frames_private.subject_of(FlatParamHandle(1)) == "unit 1: weight, bias"

    def test_of_fsdp2_before_and_after_it_knows(self) -> None:
        class FSDPParamGroup:
            _module_fqn: str | None = None

        group = FSDPParamGroup()
        assert frames_private.subject_of(group) is None
        group._module_fqn = "units.1"
        assert frames_private.subject_of(group) == "units.1"


def test_fsdp1_cannot_clip_a_float64_model(engine: Engine) -> None:
    """Why "global-norm" is asked of fsdp1 in float32 only; when this fails, declare GlobalNormRule(dtype="case")."""
    execution = Run(engine, "fsdp1")(one_step("float64", max_grad_norm=2.0), observe={"grad_norm"})
    assert execution.failure is not None
    assert "Double" in execution.failure.text
    assert "Float" in execution.failure.text


def test_fsdp1_does_not_reduce_over_replicas_that_do_not_shard(engine: Engine) -> None:
    """pytorch#154888: HYBRID_SHARD on an (n, 1) mesh. The adapter says NO_SHARD there instead."""
    case = dataclasses.replace(BASE, mesh=MeshSpec(dp_shard=1, dp_replicate=2))
    known, worked_around = Run(engine, "fsdpcheck.adapters.builtin.fsdp1:hybrid_of_one"), Run(engine, "fsdp1")
    execution = known(case)
    assert {call.group for result in execution.ranks for call in result.trace} == {(0,), (1,)}
    with pytest.raises(Violation, match="the parameters are not the single device's"):
        assert_parameters_equal(execution, known.answer(case))
    assert_parameters_equal(worked_around(case), known.answer(case))


def test_fsdp1_loses_a_gradient_of_a_weight_of_two_units_on_one_shard(engine: Engine) -> None:
    """torch 2.13. The adapter refuses such a weight."""
    model = ModelSpec((LayerSpec(1), LayerSpec(1), LayerSpec(1)), tied=(0, 1), units=(1, 1, 1))
    case = TrainingCase(model, MeshSpec(1), BatchLayout("contiguous", 1))
    known = Run(engine, "fsdp1:tied_apart")
    with pytest.raises(Violation, match="the parameters are not the single device's"):
        assert_parameters_equal(known(case), known.answer(case))
    refused = Run(engine, "fsdp1")(case)
    assert refused.failure is not None
    assert "is in two units: on one shard FSDP1 loses the gradient of one" in refused.failure.text


def test_a_frozen_unit_that_passes_on_its_input_raises_in_fsdp1(engine: Engine) -> None:
    """torch 2.13. The second micro-batch has no sample, so none for the middle layer."""
    layers = (LayerSpec(1), LayerSpec(1, frozen="weight", used="routed"), LayerSpec(1))
    case = TrainingCase(
        ModelSpec(layers, units=(1, 1, 1)), MeshSpec(1), BatchLayout("contiguous", 1), StepSpec(micro_batches=2)
    )
    failure = Run(engine, "fsdp1:passed_on")(case).failure
    assert failure is not None
    assert "current state is TrainingState.FORWARD_BACKWARD" in failure.text
    run = Run(engine, "fsdp1")
    assert_parameters_equal(run(case), run.answer(case))


def test_what_is_thawed_behind_an_evaluation_is_frozen_again_by_fully_shard(engine: Engine) -> None:
    """torch 2.13: where it is kept gathered, as the root is by default. The adapter frees it before."""
    model = ModelSpec((LayerSpec(2, frozen="weight"), LayerSpec(2)), features=2)
    step = StepSpec(steps=3, normaliser=4, evaluates="no_grad", thaws=True)
    case = dataclasses.replace(BASE, model=model, mesh=MeshSpec(2, reshard_after_forward=False), step=step)
    known, right = Run(engine, "fully_shard:thawing"), Run(engine, "fully_shard")
    with pytest.raises(Violation, match=r"step 2, rank 0, tail\.linear0"):
        assert_parameters_equal(known(case), known.answer(case))
    assert_parameters_equal(right(case), right.answer(case))


def test_fsdp1_loses_the_first_gradient_of_what_is_thawed_on_one_shard(engine: Engine) -> None:
    """torch 2.13, of micro-batches under no_sync. The adapter refuses to thaw there."""
    model = ModelSpec((LayerSpec(2, frozen="weight"), LayerSpec(2)), features=2)
    step = StepSpec(steps=2, normaliser=4, micro_batches=2, sync_every=False, thaws=True)
    case = dataclasses.replace(BASE, model=model, mesh=MeshSpec(1), step=step)
    known = Run(engine, "fsdp1:thawing")
    with pytest.raises(Violation, match=r"step 1, rank 0, tail\.linear0"):
        assert_parameters_equal(known(case), known.answer(case))
    refused = Run(engine, "fsdp1")(case).failure
    assert refused is not None
    assert "loses gradients of what is thawed" in refused.text


def test_fsdp1_cannot_train_behind_a_forward_in_inference_mode(engine: Engine) -> None:
    """torch 2.13 (pytorch#113203): where nobody looks at parameters between, which gathers them anew."""
    case = dataclasses.replace(BASE, mesh=MeshSpec(2), step=StepSpec(steps=3, evaluates="inference_mode"))
    known = Run(engine, "fsdp1:inferring")
    assert_parameters_equal(known(case), known.answer(case))
    unseen = known(case, late=True)
    assert unseen.failure is not None
    assert "`grad_fn` is needed" in unseen.failure.text
    without = dataclasses.replace(case, step=dataclasses.replace(case.step, evaluates="no_grad"))
    assert known(without, late=True).failure is None
    assert "inference-mode" not in Run(engine, "fsdp1").features.accepts


def test_fully_shard_cannot_train_behind_a_first_forward_in_inference_mode(engine: Engine) -> None:
    """torch 2.13: what was gathered into stays an inference tensor. Behind a first step it is no longer one."""
    known = Run(engine, "fully_shard:inferring")
    for mesh, words in ((MeshSpec(1), "do not track version counter"), (MeshSpec(2), "inference tensor")):
        case = dataclasses.replace(BASE, mesh=mesh, step=dataclasses.replace(BASE.step, evaluates="inference_mode"))
        execution = known(case)
        assert execution.failure is not None
        assert words in execution.failure.text
        without = dataclasses.replace(case, step=dataclasses.replace(case.step, evaluates="no_grad"))
        assert_parameters_equal(known(without), known.answer(without))


def test_fully_shard_reduces_only_what_a_rank_has_used_of_a_unit(engine: Engine) -> None:
    """pytorch#158719: where samples leave a layer out on one rank alone, ranks send buffers of other sizes."""
    layers = (LayerSpec(2, used="routed"), LayerSpec(2))
    model = ModelSpec(layers, features=2, units=(2,))
    for seed, kind in ((0, "mismatch"), (3, None)):
        case = dataclasses.replace(BASE, model=model, mesh=MeshSpec(2), layout=BatchLayout(batch_size=2), seed=seed)
        failure = Run(engine, "fully_shard:routed")(case).failure
        assert (failure.kind if failure is not None else None) == kind
        for right in ("fsdp1", "ddp:finding_unused", "reference"):
            run = Run(engine, right)
            assert_parameters_equal(run(case), run.answer(case))


@pytest.mark.parametrize("frozen", [False, True])
def test_fsdp1_gives_a_frozen_module_beside_a_trained_one_a_backward(engine: Engine, frozen: bool) -> None:
    """torch 2.13: its weight is a view of the flat parameter, which needs a gradient. So fsdp1 promises no hooks."""
    first = LayerSpec(2, frozen="all" if frozen else "none")
    case = dataclasses.replace(BASE, model=ModelSpec((first, LayerSpec(1)), features=2))
    execution = Run(engine, "fsdpcheck.adapters.builtin.fsdp1:hooked")(case, probes=(probes.hook_calls,))
    if not frozen:
        assert_hooks_fire(execution)
        return
    with pytest.raises(Violation, match=r"full_backward hook of tail\.linear0 fired 1 times"):
        assert_hooks_fire(execution)


def test_fsdp1_adds_up_micro_batches_in_bfloat16_under_no_sync(engine: Engine) -> None:
    """torch 2.13: into the gradient of the gathered parameters. ``fully_shard`` adds up in float32."""
    case = TrainingCase(
        ModelSpec((LayerSpec(1),)),
        layout=BatchLayout(batch_size=3),
        step=StepSpec("l1", micro_batches=3, sync_every=False),
        arithmetic=Arithmetic("float32", project=False, compute="bfloat16", inputs=255),
        seed=7,
    )
    known = Run(engine, "fsdpcheck.adapters.builtin.fsdp1:unsynced").watching(["grads"])
    with pytest.raises(Violation, match="the gradient is not the single device's") as caught:
        assert_gradients_equal(known(case), known.answer(case))
    assert (caught.value.got, caught.value.wanted) == ("264.0", "265.0")  # 140 - 10 + 135, and 265 takes 9 bits
    for ref in ("fsdp1", "fully_shard", "reference", "reference_fsdp2"):
        run = Run(engine, ref).watching(["grads"])
        assert_gradients_equal(run(case), run.answer(case))


def test_fsdp1_cannot_put_off_the_reduction_of_tied_parameters_in_mixed_precision(engine: Engine) -> None:
    """torch 2.13, one shard: RuntimeError in FSDP1's own pre-forward. The adapter reduces every micro-batch there."""
    tied = CASES["tied"]
    case = dataclasses.replace(
        tied,
        mesh=MeshSpec(1),
        step=dataclasses.replace(tied.step, micro_batches=2, sync_every=False),
        arithmetic=CASES["bfloat16"].arithmetic,
    )
    known, worked_around = Run(engine, "fsdpcheck.adapters.builtin.fsdp1:unsynced"), Run(engine, "fsdp1")
    failure = known(case).failure
    assert failure is not None
    assert "attempting to assign a gradient with dtype 'c10::BFloat16'" in failure.text
    assert_parameters_equal(worked_around(case), known.answer(case))
    in_float32 = dataclasses.replace(case, arithmetic=Arithmetic("float32"))
    assert_parameters_equal(known(in_float32), known.answer(in_float32))
