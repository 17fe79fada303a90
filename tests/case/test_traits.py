"""What a case demands of an implementation, by the names of traits."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    OptimizerSpec,
    StepSpec,
    TrainingCase,
    Trait,
    UserModelSpec,
)
from tests.common.cases_by_hand import BY_UNIT, ONE_UNIT, SMALLEST, TWO
from tests.common.tables import each

ROUTED = ModelSpec((LayerSpec(1, used="routed"), LayerSpec(2)))
REUSED = ModelSpec((LayerSpec(1, used="twice"), LayerSpec(2)))
PADDED_IN_A_CIRCLE = ModelSpec(
    (LayerSpec(1, kind="conv", kernel=2, padding=1, padding_mode="circular"),), "signal", length=2
)
MASKED = ModelSpec((LayerSpec(2, kind="attention", heads=2, mask="causal"),), "tokens", features=2)
DROPPED = ModelSpec((LayerSpec(1, used="dropped"), LayerSpec(2)))
ONE_ROW = ModelSpec((LayerSpec(1, used="for all"), LayerSpec(2)))
UNEQUAL = replace(SMALLEST, mesh=MeshSpec(2), step=StepSpec(micro_batches=2, sync_every=False, unequal=True))
SPELLED_OUT = ModelSpec((), own=UserModelSpec("mine:build", "mine:batch", traits=("spelled-out-private", "surrogates")))
GROUPED = ModelSpec((LayerSpec(1, True, kind="group_norm"),), "signal", length=2)


def private(model: ModelSpec) -> TrainingCase:
    return TrainingCase(model, step=StepSpec(clipping="unclipped"))


NEEDED: list[tuple[Trait, TrainingCase]] = [
    ("bias", TrainingCase(ModelSpec((LayerSpec(1, True),)))),
    ("tokens", TrainingCase(ModelSpec((LayerSpec(1),), "tokens"))),
    ("sequence", TrainingCase(ModelSpec((LayerSpec(1),), "tokens"))),
    ("sequence", TrainingCase(ModelSpec((LayerSpec(1),), "sequence"))),
    ("padding_idx", TrainingCase(ModelSpec((LayerSpec(1),), "tokens", padding_idx=1))),
    ("layer-norm", TrainingCase(ModelSpec((LayerSpec(1),), features=2, layer_norm=True))),
    ("tied", TrainingCase(ModelSpec(TWO, features=2, tied=(0, 1)))),
    ("tied-apart", TrainingCase(ModelSpec(TWO, features=2, tied=(0, 1), units=(1, 1)))),
    ("tied-apart", TrainingCase(ModelSpec(TWO, features=2, tied=(0, 1), units=(1,)))),
    (
        "tied-private",
        TrainingCase(ModelSpec(TWO, features=2, tied=(0, 1)), step=StepSpec(clipping="probe")),
    ),
    ("frozen", TrainingCase(ModelSpec((LayerSpec(1), LayerSpec(1, frozen="weight"))))),
    ("root-parameters", SMALLEST),
    ("keep-unsharded", replace(SMALLEST, mesh=MeshSpec(reshard_after_forward=False))),
    (
        "replicated-shards",
        replace(SMALLEST, mesh=MeshSpec(2, 1), layout=BatchLayout("by-replica", lists=((0,),))),
    ),
    ("replicated", replace(SMALLEST, mesh=MeshSpec(2), layout=BatchLayout("replicated"))),
    ("ragged", replace(SMALLEST, mesh=MeshSpec(2), layout=BatchLayout(batch_size=3))),
    ("empty-rank", replace(SMALLEST, mesh=MeshSpec(2))),
    ("empty-rank", replace(SMALLEST, step=StepSpec(micro_batches=2))),
    ("wrap-around", replace(SMALLEST, mesh=MeshSpec(2), layout=BatchLayout("sampler"))),
    ("micro-batches", replace(SMALLEST, step=StepSpec(micro_batches=2))),
    ("no-sync", replace(SMALLEST, step=StepSpec(micro_batches=2, sync_every=False))),
    ("mean", replace(SMALLEST, step=StepSpec(reduction="mean"))),
    ("momentum", replace(SMALLEST, step=StepSpec(optimizer=OptimizerSpec(momentum=0.5)))),
    ("weight-decay", replace(SMALLEST, step=StepSpec(optimizer=OptimizerSpec(weight_decay=0.5)))),
    ("adamw", replace(SMALLEST, step=StepSpec(optimizer=OptimizerSpec("adamw")))),
    ("matrix-optimizer", replace(SMALLEST, step=StepSpec(optimizer=OptimizerSpec("newton_schulz")))),
    ("row-optimizer", replace(SMALLEST, step=StepSpec(optimizer=OptimizerSpec("row_scaled")))),
    ("float32", replace(SMALLEST, arithmetic=Arithmetic("float32"))),
    ("rows<ranks", replace(SMALLEST, mesh=MeshSpec(2))),
    ("uneven-rows", TrainingCase(ModelSpec((LayerSpec(3),)), MeshSpec(2))),
    ("uneven-rows", TrainingCase(ModelSpec((LayerSpec(2),), "tokens", vocabulary=3), MeshSpec(2))),
    ("uneven-rows", TrainingCase(ModelSpec((LayerSpec(3),), features=2, layer_norm=True), MeshSpec(3))),
    ("project", SMALLEST),
    ("conv", TrainingCase(ModelSpec((LayerSpec(1, kind="conv"),), "signal"))),
    ("conv", TrainingCase(ModelSpec((LayerSpec(1),), "volume"))),
    ("conv-private", private(ModelSpec((LayerSpec(1, kind="conv"),), "image"))),
    ("group-norm", TrainingCase(GROUPED)),
    ("group-norm-private", private(GROUPED)),
    ("rms-norm", TrainingCase(ModelSpec((LayerSpec(1, kind="rms_norm"),)))),
    ("rms-norm-private", private(ModelSpec((LayerSpec(1, kind="rms_norm"),)))),
    ("layer-norm", TrainingCase(ModelSpec((LayerSpec(1, True, kind="layer_norm"),)))),
    ("layer-norm-without-bias", TrainingCase(ModelSpec((LayerSpec(1, kind="layer_norm"),)))),
    ("attention", TrainingCase(ModelSpec((LayerSpec(1, kind="attention"),), "tokens"))),
    ("attention-private", private(ModelSpec((LayerSpec(1, kind="attention"),), "sequence"))),
    ("bags", TrainingCase(ModelSpec((LayerSpec(1),), "bags"))),
    ("bags-private", private(ModelSpec((LayerSpec(1),), "bags"))),
    ("surrogates", TrainingCase(ModelSpec((LayerSpec(1, activation="silu"),)))),
    ("surrogates", TrainingCase(ModelSpec((LayerSpec(1, kind="layer_norm"),)))),
    ("surrogates", TrainingCase(ModelSpec((LayerSpec(1, kind="attention"),), "sequence"))),
    ("surrogates", replace(SMALLEST, step=StepSpec("cross_entropy"))),
    ("real", replace(SMALLEST, arithmetic=Arithmetic(project=False, numbers="real"))),
    ("own-layers", TrainingCase(ModelSpec((), own=UserModelSpec("mine:build", "mine:batch", traits=("own-layers",))))),
    ("premultiply", replace(SMALLEST, arithmetic=Arithmetic(averaging="premultiply"))),
    ("bfloat16", replace(SMALLEST, arithmetic=Arithmetic("float32", compute="bfloat16"))),
    ("tf32", replace(SMALLEST, arithmetic=Arithmetic("float32", compute="tf32"))),
    ("adam", replace(SMALLEST, step=StepSpec(optimizer=OptimizerSpec("adam")))),
    ("schedule", replace(SMALLEST, step=StepSpec(optimizer=OptimizerSpec(schedule="halving")))),
    ("resume", replace(SMALLEST, step=StepSpec(resume=True))),
    ("fractional-normaliser", replace(SMALLEST, step=StepSpec(normaliser=0.5))),
    ("hsdp", replace(SMALLEST, mesh=MeshSpec(1, 2))),
    ("per-layer-clipping", TrainingCase(ONE_UNIT, step=BY_UNIT)),
    ("routed", TrainingCase(ROUTED)),
    ("routed-private", private(ROUTED)),
    ("routed-alone", TrainingCase(replace(ROUTED, units=(1,)))),
    ("reused", TrainingCase(REUSED)),
    ("reused-private", private(REUSED)),
    ("one-row", TrainingCase(ONE_ROW)),
    ("one-row-private", private(ONE_ROW)),
    ("dropped", TrainingCase(DROPPED)),
    ("dropped-private", private(DROPPED)),
    ("routed-alone", TrainingCase(replace(DROPPED, units=(1, 1)))),
    ("several-heads-private", private(ModelSpec((LayerSpec(2, kind="attention", heads=2),), "tokens", features=2))),
    ("same-padding-private", private(ModelSpec((LayerSpec(1, kind="conv", kernel=2, same=True),), "signal", length=2))),
    ("padding-mode-private", private(PADDED_IN_A_CIRCLE)),
    ("masked-private", private(MASKED)),
    ("bare-units", TrainingCase(ModelSpec((LayerSpec(1), LayerSpec(1)), units=(1,), bare_units=True))),
    ("mean-bags-private", private(ModelSpec((LayerSpec(1),), "bags", bags="mean"))),
    ("evaluation", replace(SMALLEST, step=StepSpec(evaluates="no_grad"))),
    ("inference-mode", replace(SMALLEST, step=StepSpec(evaluates="inference_mode"))),
    ("rebuilt", replace(SMALLEST, step=StepSpec(rebuilds=True))),
    ("parameter-groups", replace(SMALLEST, step=StepSpec(optimizer=OptimizerSpec(groups="vectors apart")))),
    ("thawed", replace(SMALLEST, step=StepSpec(steps=2, thaws=True))),
    ("frozen-again", replace(SMALLEST, step=StepSpec(steps=3, thaws=True, refreezes=True))),
    ("spelled-out-private", private(SPELLED_OUT)),
    ("unequal-micro-batches", UNEQUAL),
    ("beside-private", private(ModelSpec((LayerSpec(1, used="beside"),)))),
    ("across-samples-private", private(ModelSpec((LayerSpec(1, used="across"),)))),
    ("across-samples-private", private(ModelSpec((LayerSpec(1, used="reordered"),)))),
    ("across-samples-private", replace(SMALLEST, step=StepSpec(clipping="unclipped", across="outputs"))),
    ("secure-noise", replace(SMALLEST, step=StepSpec(clipping="unclipped", secure_noise=True))),
    ("unit-groups", TrainingCase(ONE_UNIT, step=StepSpec(optimizer=OptimizerSpec(groups="last unit apart")))),
]


@each(("trait", "case"), NEEDED)
def test_a_demand_is_named(trait: Trait, case: TrainingCase) -> None:
    assert trait in case.requires()


def test_plain_and_private_demands_of_a_family_exclude_each_other() -> None:
    for trait, case in NEEDED:
        if f"{trait}-private" in get_args(Trait):
            assert f"{trait}-private" not in case.requires()
        if trait.endswith("-private"):
            assert trait.removesuffix("-private") not in case.requires()


def test_what_a_model_spells_out_is_demanded_of_private_steps_on_a_grid_alone() -> None:
    real = replace(private(SPELLED_OUT), arithmetic=Arithmetic(project=False, numbers="real"))
    for case in (TrainingCase(SPELLED_OUT), real):
        assert "spelled-out-private" not in case.requires()


def test_real_numbers_keep_the_true_functions() -> None:
    tanh = ModelSpec((LayerSpec(1, activation="tanh"),))
    real = TrainingCase(tanh, arithmetic=Arithmetic(project=False, numbers="real"))
    assert real.requires() >= {"real"}
    assert "surrogates" not in real.requires()
    for polynomial in ("identity", "relu", "leaky_relu", "hardtanh", "abs"):
        assert "surrogates" not in TrainingCase(ModelSpec((LayerSpec(1, activation=polynomial),))).requires()  # type: ignore[arg-type]


def test_a_layer_norm_with_a_bias_is_not_one_without() -> None:
    biased = ModelSpec((LayerSpec(2, True, kind="layer_norm"),), features=2, layer_norm=True)
    assert "layer-norm-without-bias" not in TrainingCase(biased).requires()


def test_every_trait_can_be_demanded_and_the_plainest_case_demands_none() -> None:
    assert {trait for trait, _ in NEEDED} == set(get_args(Trait))
    assert (
        TrainingCase(ModelSpec((LayerSpec(1),), units=(1,)), arithmetic=Arithmetic(project=False)).requires()
        == frozenset()
    )
    even = TrainingCase(ModelSpec((LayerSpec(4),), units=(1,)), MeshSpec(2), BatchLayout("sampler", 2, drop_last=True))
    assert even.requires() == {"project"}
