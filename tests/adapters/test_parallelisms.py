"""Adapters of other parallelisms than sharded parameters: their laws hold, and their known findings are found."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any, cast

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdpcheck import adapters
from fsdpcheck.adapters.builtin.sequence_parallel import SequenceParallel
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, OptimizerSpec, StepSpec, TrainingCase
from fsdpcheck.checks.training import assert_gradients_equal, assert_parameters_equal
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import AdapterError
from fsdpcheck.findings import tokens
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run

ZERO = ("deepspeed:zero1", "deepspeed:zero2", "deepspeed:zero3")


def _needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


ADAPTERS: list[Any] = [
    "zero_redundancy",
    "tensor_parallel",
    "pipeline",
    "pipeline:one_f_one_b",
    "sequence_parallel",
    *(pytest.param(name, marks=_needs(name)) for name in ("accelerate", "lightning_fabric")),
    *(pytest.param(name, marks=_needs("deepspeed")) for name in ZERO),
    pytest.param("torchtitan", marks=_needs("torchtitan")),
]
LAWS = ("training.plain", "training.gradients", "global-norm.update", "collectives.plain")
ALONG_TP = TrainingCase(
    ModelSpec((LayerSpec(4, activation="relu"), LayerSpec(2)), features=2, units=(1, 1)),
    MeshSpec(axes=(("tp", 2),)),
    BatchLayout("contiguous", 4),
    StepSpec(steps=2, normaliser=4),
)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_laws_of_plain_training_hold(name: str, law: str, engine: SimulatedEngine) -> None:
    verdict = check_law(chapters()[law], Run(engine, name), world_sizes=(2, 4), most=4)
    assert (verdict.status, verdict.reason) == ("holds", "")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ADAPTERS)
def test_each_law_that_is_promised_holds(name: str, engine: SimulatedEngine) -> None:
    run, judged = Run(engine, name), {}
    for law in chapters().values():
        if not law.on_real_ranks and not law.not_promised(run.features):
            judged[law.name] = check_law(law, run, most=20).status
    assert set(judged.values()) <= {"holds", "not supported"}, judged
    assert len(judged) > 5


def test_ranks_along_tp_are_given_one_batch_and_show_one_whole(engine: SimulatedEngine) -> None:
    run = Run(engine, "tensor_parallel")
    execution = run(ALONG_TP, observe={"grads"})
    assert_parameters_equal(execution, run.answer(ALONG_TP))
    wide = replace(ALONG_TP, mesh=MeshSpec(2, axes=(("tp", 2),)))
    assert_parameters_equal(run(wide), run.answer(wide))


def test_stages_show_what_they_have_and_data_ranks_their_shards_of_it(engine: SimulatedEngine) -> None:
    run = Run(engine, "pipeline")
    for mesh in (MeshSpec(axes=(("pp", 2),)), MeshSpec(2, axes=(("pp", 2),)), MeshSpec(axes=(("pp", 3),))):
        case = replace(ALONG_TP, mesh=mesh)
        assert_parameters_equal(run(case, observe={"grads"}), run.answer(case))


@pytest.mark.parametrize(
    ("mistake", "law"),
    [("averaging", "training.plain"), ("keeping", "training.plain"), ("of_one_stage", "global-norm.returned")],
)
def test_mistakes_in_a_pipeline_are_found(mistake: str, law: str, engine: SimulatedEngine) -> None:
    run = Run(engine, f"tests/toys/pipelines.py:{mistake}")
    verdict = check_law(chapters()[law], run, world_sizes=(2, 4), most=8, shrink=False)
    assert verdict.finding is not None
    assert verdict.finding.kind == "value"


def test_stages_that_differ_in_what_each_says_to_own_are_no_whole(engine: SimulatedEngine) -> None:
    run = Run(engine, "tests/toys/pipelines.py:apart")
    with pytest.raises(
        AdapterError, match=r"instrument.weight: ranks 0 and 1 both hold place \[0, 0\], and their values"
    ):
        run(replace(ALONG_TP, mesh=MeshSpec(axes=(("pp", 2),))))


def test_a_mesh_that_deals_no_samples_out_asks_for_no_distributed_batch(engine: SimulatedEngine) -> None:
    """All ranks along "pp" have the whole batch: no case can have the label, and the law holds without it."""
    verdict = check_law(chapters()["training.plain"], Run(engine, "tests/toys/pipelines.py:alone"), world_sizes=(2,))
    assert (verdict.status, verdict.reason) == ("holds", "")


def test_a_known_finding_of_tensor_parallel_is_found(engine: SimulatedEngine) -> None:
    assert "rows<ranks" not in adapters.load("tensor_parallel").features.accepts
    few = replace(ALONG_TP, model=ModelSpec((LayerSpec(1),), features=2))
    run = Run(engine, "tensor_parallel:few_rows")
    with pytest.raises(Violation, match="in-place operations that require placement changes are not supported"):
        assert_parameters_equal(run(few), run.answer(few))


def test_data_ranks_of_tensor_parallel_reduce_where_they_are_to_reduce(engine: SimulatedEngine) -> None:
    """Reduced after each of three micro-batches, and not after the last alone, three thirds round."""
    token = (
        "v2:AAAAm71Nhc54-fgd9xKrRsqu-iW5BfopqWX6wExToA_L4fHA4gCoKzVHr6DSCqZYhw55G-ppROYGsvOLclLi0xJBeQQoYoAzu1sSmd0R9QE5ed2YjLx"
        "uTlleR6qg6JvXzamc1w2NLKiY22HVLjH53RgtvxsRn-GhlS5KjjciM8ebkp_jYUmUvCxfUgRsjYEaYKCAykwFZRIUN8MScS0AOblmXg"
    )
    case = tokens.decode(token).case
    assert isinstance(case, TrainingCase)
    assert (case.mesh.dp_shard, case.step.sync_every) == (3, False)
    run = Run(engine, "tensor_parallel")
    assert_gradients_equal(run(case, observe={"grads"}), run.answer(case))


def test_weight_decay_of_a_replicated_parameter_is_not_added_up_of_thirds(engine: SimulatedEngine) -> None:
    """Of a Partial gradient and a Replicate parameter DTensor adds a third of the parameter on each of three ranks."""
    case = replace(
        ALONG_TP,
        model=ModelSpec((LayerSpec(6),), "tokens", features=6, length=3, vocabulary=6, units=(1, 1)),
        mesh=MeshSpec(axes=(("tp", 3),)),
        layout=BatchLayout("contiguous", 8),
        step=StepSpec(steps=2, normaliser=1, optimizer=OptimizerSpec("sgd", 2, weight_decay=0.5)),
    )
    run = Run(engine, "sequence_parallel")
    assert_parameters_equal(run(case), run.answer(case))


@pytest.mark.parametrize(
    "name",
    ["fully_shard", "fsdp1", *(pytest.param(one, marks=_needs(one)) for one in ("accelerate", "lightning_fabric"))],
)
def test_each_unit_is_reduced_by_itself_behind_the_last_micro_batch_alone(name: str, engine: SimulatedEngine) -> None:
    """An adapter that shards the root alone, or reduces too often, would be right in other cases than are told."""
    case = replace(ALONG_TP, mesh=MeshSpec(2), step=StepSpec(normaliser=4, micro_batches=2, sync_every=False))
    run = Run(engine, name)
    execution = run(case)
    assert_parameters_equal(execution, run.answer(case))
    reduced = [call for call in execution.ranks[0].trace if call.op == "reduce_scatter"]
    assert len(reduced) == 3, "one for each unit and the root"


def test_what_ddp_is_not_told_of_it_does_not_reduce(engine: SimulatedEngine) -> None:
    """A parameter that is thawed behind the first step: every rank keeps its own gradient of it (Lightning#20340)."""
    law = chapters()["training.thawed"]
    assert "when it is built" in law.not_promised(Run(engine, "ddp").features)
    verdict = check_law(law, Run(engine, "ddp:thawing"), world_sizes=(1, 2), most=4)
    assert verdict.finding is not None
    assert (verdict.finding.kind, verdict.finding.what) == ("value", "the parameters are not the single device's")
    assert "what is thawed behind the first step is treated as before" in verdict.finding.cause
    assert "one change: one rank" in verdict.finding.when, "changed cases thaw, and are judged all the same"
    frozen = ModelSpec((LayerSpec(2, activation="relu", frozen="weight"), LayerSpec(2)), features=2, units=(1, 1))
    case = replace(ALONG_TP, model=frozen, mesh=MeshSpec(2), step=StepSpec(steps=2, normaliser=4, thaws=True))
    run = Run(engine, "ddp:thawing")
    with pytest.raises(Violation) as found:
        assert_parameters_equal(run(case), run.answer(case))
    assert found.value.causes is not None, "a stale gradient, of the step before, lacks what was frozen then"


POSITIONS = replace(
    ALONG_TP,
    model=ModelSpec((LayerSpec(2, activation="relu"),), "sequence", features=2, length=2, layer_norm=True, units=(1,)),
    step=StepSpec(normaliser=4),
)
FROZEN_NORM = replace(
    POSITIONS, model=ModelSpec((LayerSpec(2), LayerSpec(2, kind="layer_norm", frozen="all")), "sequence", 2, 2)
)


def test_a_norm_that_was_frozen_stays_frozen_and_torch_thaws_it(engine: SimulatedEngine) -> None:
    run = Run(engine, "sequence_parallel")
    assert_gradients_equal(run(FROZEN_NORM, observe={"grads"}), run.answer(FROZEN_NORM))
    run = Run(engine, "sequence_parallel:thawing")
    with pytest.raises(Violation, match=r"layer_norm1\.weight"):
        assert_gradients_equal(run(FROZEN_NORM, observe={"grads"}), run.answer(FROZEN_NORM))


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    "layers",
    [
        (LayerSpec(2, kind="attention"),),
        (LayerSpec(2), LayerSpec(2), LayerSpec(2, kind="attention")),
        (LayerSpec(2), LayerSpec(2, used="twice")),
        (LayerSpec(2), LayerSpec(2, kind="rms_norm"), LayerSpec(2)),
    ],
)
def test_a_linear_by_rows_is_given_features_and_no_positions(
    layers: tuple[LayerSpec, ...], length: int, engine: SimulatedEngine
) -> None:
    """DTensor flattens no shard of a single position, nor one of features cut of uneven ones (pytorch#143748)."""
    model = ModelSpec(tuple(replace(layer, bias=False) for layer in layers), "sequence", 2, length)
    case, run = replace(POSITIONS, model=model), Run(engine, "sequence_parallel")
    assert_gradients_equal(run(case, observe={"grads"}), run.answer(case))


class Forgetful(SequenceParallel):
    """The norms' parameters have each rank's own gradient, of its own positions: nobody adds them up."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().parallelize(model, mesh)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.forward = lambda x, module=module: _own_positions(x, module)  # type: ignore[method-assign,misc]


def _own_positions(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    assert isinstance(x, DTensor)
    assert (x.placements, x.to_local().shape[1]) == ((Shard(1),), x.shape[1] // 2)
    weight, bias = (cast(DTensor, value).to_local() for value in (norm.weight, norm.bias))  # the gradient is said whole
    y = nn.functional.layer_norm(x.to_local(), norm.normalized_shape, weight, bias)
    return DTensor.from_local(y, x.device_mesh, x.placements)


forgetful = Forgetful("sequence parallel, without the sum of the norms' gradients")


def test_norms_whose_gradients_are_of_their_ranks_positions_alone_are_found(engine: SimulatedEngine) -> None:
    run = Run(engine, "sequence_parallel")
    assert_gradients_equal(run(POSITIONS, observe={"grads"}), run.answer(POSITIONS))
    run = Run(engine, f"{__name__}:forgetful")
    with pytest.raises(Violation, match=r"(?s)gradient is not the single device's.*layer_norm"):
        assert_gradients_equal(run(POSITIONS, observe={"grads"}), run.answer(POSITIONS))
