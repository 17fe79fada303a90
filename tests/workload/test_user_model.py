"""A user's own model: what is seen of it, what is refused and how, and that its cases are judged like all others."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpcheck import adapters, engines, oracle
from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    LayerSpec,
    ModelSpec,
    OptimizerSpec,
    StepSpec,
    TrainingCase,
    UserModelSpec,
    from_json,
)
from fsdpcheck.checks import poisson
from fsdpcheck.errors import InvalidCase, NotExact, UsageError
from fsdpcheck.exact import binomial
from fsdpcheck.findings import tokens
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import batched_step, certificate, user_model_roundings
from fsdpcheck.strategies import user_model as user_model_cases
from fsdpcheck.workload import batches, models
from fsdpcheck.workload.clip_groups import is_instrument
from fsdpcheck.workload.user_model import casting, inspection
from fsdpcheck.workload.user_model import loading as user_model
from tests.common.tables import each
from tests.toys import turning_models

TOYS = str(Path(__file__).parents[1] / "toys" / "own_models.py")
TURNING = str(Path(__file__).parents[1] / "toys" / "turning_models.py")
LAWS = str(Path(__file__).parents[1] / "toys" / "laws.py")
GPT = str(Path(__file__).parents[2] / "docs" / "examples" / "small_gpt.py")


def _own(build: str = "right", batch: str = "batch", loss: str = "", file: str = TOYS) -> UserModelSpec:
    return inspection.inspect(f"{file}:{build}", f"{file}:{batch}", f"{file}:{loss}" if loss else "").own


def _case(own: UserModelSpec, numbers: str = "grid", loss: str = "mse") -> TrainingCase:
    dtype = "float32" if own.names else "float64"
    arithmetic = Arithmetic(dtype, project=False, numbers=numbers)  # type: ignore[arg-type]
    step = StepSpec(loss)  # type: ignore[arg-type]
    return TrainingCase(
        ModelSpec((), own=own), layout=BatchLayout("contiguous", 3), step=step, arithmetic=arithmetic, seed=7
    )


def test_units_and_traits_are_seen() -> None:
    own = _own()
    assert own.units == ("blocks.0", "blocks.1")
    assert (own.features, own.targets, own.rows) == (2, 2, (3, 3, 3, 3, 2))
    assert own.traits == ("bias", "root-parameters")
    assert _own("with_surrogate").traits == ("bias", "layer-norm", "root-parameters", "surrogates")
    assert "own-layers" in _own("own_layer").traits
    assert "surrogates" in _own(batch="classes").traits


def test_complex_buffers_stay_complex_in_every_dtype() -> None:
    for dtype, wanted in ((torch.float64, torch.complex128), (torch.float32, torch.complex64)):
        model = casting.cast(turning_models.turning_by_one_for_two(), dtype)
        for name in ("turns", "blocks.1.turns"):
            assert model.get_buffer(name).dtype == wanted
            assert bool(model.get_buffer(name).imag.all())
        assert {value.dtype for value in model.parameters()} == {dtype}
        assert "turns" not in model.state_dict()


@each("build", ["turning", "turning_by_angles", "turning_by_tables"])
def test_turns_by_complex_numbers_and_by_tables_are_exact(build: str) -> None:
    own = _own(build, file=TURNING)
    assert own.units == ("blocks.0", "blocks.1")
    assert "surrogates" in own.traits
    case = _case(own)
    certificate.prove(case, oracle.answer(case))
    turned, model = [], models.wide(case)
    model.get_submodule("model.blocks.0").register_forward_pre_hook(lambda module, given: turned.append(given[0]))
    given = batches.inputs(case)
    model(given)
    assert torch.equal(turned[0] * 2, (turned[0] * 2).round())
    assert not torch.equal(turned[0][:, :3], given)


def test_what_computes_in_complex_numbers_otherwise_is_refused() -> None:
    case = _case(_own("turning_back", file=TURNING))
    with pytest.raises(NotExact, match="computes in complex numbers"):
        certificate.prove(case, oracle.answer(case))


def test_the_example_is_seen_as_what_it_is() -> None:
    own = _own("build", file=GPT)
    assert own.units == ("blocks.0", "blocks.1")
    wanted = {"attention", "bias", "layer-norm", "root-parameters", "sequence", "surrogates", "tokens"}
    assert set(own.traits) == wanted
    assert set(_own("tied", file=GPT).traits) == wanted | {"tied"}


@each(
    ("build", "said"),
    [
        ("missing", "has no 'missing'"),
        ("no_module", "built no module"),
        ("raises", "RuntimeError: no such checkpoint"),
        ("random_build", "two builds that differ in head.weight"),
        ("batch_norm", "layer front.0 mixes samples\n  got     BatchNorm1d"),
        ("dropout", "layer front.0 drops at random\n  got     Dropout(p=0.5) in training"),
        ("random_forward", "is random, first in layer front.0 (Calls)"),
        ("mixing", "mixes samples, first in layer front.0 (Calls)"),
        ("divided", "mixes samples: outputs depend on how many are computed together"),
        ("crowded", "among outputs of sample 1 in a batch of 9"),
        ("every_third", "among outputs of samples 1 to 2 in a batch of 9"),
        ("last_doubled", "among outputs of sample 1 in a batch of 9"),
        ("divided_behind", "mixes samples: gradients depend on how many"),
        ("counting", "changes front.0.seen"),
        ("frozen", "has nothing to train"),
        ("complex_parameter", "parameter phase is not floating-point\n  got     torch.complex64"),
        ("scalar_parameter", "parameter scale has no dimension"),
        ("reserved_name", "parameter instrument.weight of model"),
        ("shared", "blocks.0.0.weight in blocks.0 is blocks.1.0.weight in blocks.1"),
        ("tuple_output", "raised"),
    ],
)
def test_a_model_that_cannot_be_checked_is_refused(build: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        _own(build)
    assert said in str(refused.value)


@each(
    ("batch", "said"),
    [
        ("missing", "has no 'missing'"),
        ("no_pair", "is no pair of tensors\n  got     Tensor"),
        ("dictionary", "is no pair of tensors\n  got     ['dict', 'Tensor']"),
        ("few", "shape [8, 3]\n  wanted  at least 27 samples along dim 0"),
        ("transposed", "dim 1 has 27: is that the sample axis?"),
        ("random_batch", "gives other inputs each time"),
        ("alike", "the samples are all alike"),
        ("wide_targets", "got     targets [4, 5] for outputs [4, 2]\n  wanted  targets [4, 2]"),
    ],
)
def test_a_batch_that_cannot_be_used_is_refused(batch: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        _own(batch=batch)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("averaged", "shape []"),
        ("centred", "mixes samples"),
        ("shared_out", "own_models.py:shared_out' mixes samples: losses depend on how many"),
    ],
)
def test_a_loss_of_all_samples_together_is_refused(loss: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        _own(loss=loss)
    assert said in str(refused.value)


_CARELESS = """
import os, random, sys, warnings
import numpy, torch
os.chdir(os.path.dirname(__file__))
torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
warnings.simplefilter("error")
DRAWN = [torch.rand(1).item(), numpy.random.rand(), random.random()]

def build():
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.bias, DRAWN[0] + numpy.random.rand() + random.random())
    return model

def batch(n):
    return torch.randn(n, 3) * sum(DRAWN[1:]), torch.randn(n, 2)
"""


def test_a_file_that_draws_and_sets_when_it_is_imported_is_no_random_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each build has what the import left, and the same streams; and what is drawn in the import is always the same."""
    found = []
    monkeypatch.chdir(Path(__file__).parent)
    before = list(warnings.filters)
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text(_CARELESS)
        own = inspection.inspect(f"{tmp_path / name}.py:build", f"{tmp_path / name}.py:batch").own
        assert all(value.dtype == torch.float64 for value in user_model.values(own.build).values())
        found.append((*user_model.values(own.build).values(), *user_model.samples(own.batch, user_model.NEEDED)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert (torch.get_default_dtype(), Path.cwd()) == (torch.float32, Path(__file__).parent)
    assert not torch.are_deterministic_algorithms_enabled()
    assert list(warnings.filters) == before


def test_roundings_of_other_kernels_are_no_dependence_on_the_number_of_samples() -> None:
    """The recurrent one gives other bits in batches of other sizes."""
    model, inputs = user_model.model(f"{TOYS}:recurrent").double(), user_model.samples(f"{TOYS}:batch", 9)[0].double()
    assert not torch.equal(model(inputs)[:1], model(inputs[:1]))
    assert _own("recurrent").units == ()


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"no module 'no_such_package' on the import path"):
        inspection.inspect("no_such_package.models:build", f"{TOYS}:batch")


@pytest.mark.parametrize(
    ("units", "said"),
    [
        (("blocks.2",), "no module 'blocks.2' to shard; known: blocks, blocks.0"),
        (("front",), "has no parameters"),
        (("blocks", "blocks.0"), "'blocks.0' is in 'blocks'"),
        (("head", "head"), "name each module once"),
    ],
)
def test_units_that_cannot_be_are_refused(units: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        inspection.inspect(f"{TOYS}:right", f"{TOYS}:batch", units=units)
    assert said in str(refused.value)


def test_a_model_that_raises_on_no_samples_is_given_none() -> None:
    seen = inspection.inspect(f"{TOYS}:not_on_none", f"{TOYS}:batch")
    assert "empty-rank" in seen.left_out
    assert "left out" in "\n".join(seen.notes)
    assert "empty-rank" not in inspection.inspect(f"{TOYS}:right", f"{TOYS}:batch").left_out


def test_dropout_in_eval_mode_is_taken_and_stays_off() -> None:
    model = models.build(_case(_own("dropout_off")))
    assert not model.get_submodule("model.front.0").training


def test_integers_are_kept_and_fractions_drawn_or_kept() -> None:
    own = _own("build", file=GPT)
    case = _case(own, loss="cross_entropy")
    assert torch.equal(batches.inputs(case), batches.inputs(replace(case, seed=8)))
    grid, real = _case(_own()), _case(_own(), "real")
    assert torch.equal(batches.inputs(grid), batches.inputs(grid).round())
    assert not torch.equal(batches.inputs(real), batches.inputs(real).round())


def test_a_smaller_case_has_the_first_of_the_users_samples() -> None:
    """What shrinking leaves of a batch is what the user gave, in the user's order, whatever batch(n) makes of n."""
    own = _own(batch="classes")
    classes = user_model.samples(own.batch, user_model.NEEDED)[1]
    alone = [user_model.drawn(own.batch, count)[1] for count in range(1, 9)]
    assert not all(torch.equal(some, classes[: len(some)]) for some in alone)  # the user's batch(3) has other samples
    for count in range(1, 9):
        case = replace(_case(own, loss="cross_entropy"), layout=BatchLayout("contiguous", count))
        assert torch.equal(batches.targets(case).flatten().long(), classes[:count])


@pytest.mark.nightly
def test_a_finding_on_a_users_model_is_shrunk_to_the_fewest_of_its_samples() -> None:
    engine = engines.open_engine("simulated")
    finding = check_law(chapters([LAWS])["toy.small"], Run(engine, "fully_shard", own=_own()), world_sizes=(1,)).finding
    engine.close()
    assert finding is not None
    case = tokens.decode(finding.token).case
    assert (case.layout.batch_size, case.step.steps) == (4, 1)
    assert case.model.own == _own()


def test_of_each_row_of_a_users_weights_about_one_is_kept_and_no_row_is_dead() -> None:
    """Else a deep model needs more bits than there are, or no gradient gets through it; vectors have no zeros."""
    case = _case(_own("build", file=GPT))
    drawn = [models.initial_parameters(replace(case, seed=seed)) for seed in range(200)]
    for name, first in drawn[0].items():
        if is_instrument(name):
            continue
        d = first.shape[-1] if first.dim() > 1 else 1
        kept = torch.cat([one[name].reshape(-1, d).count_nonzero(1) for one in drawn])
        assert bool((kept >= 1).all())
        several = 1 - (1 - 1 / d) ** d - (1 - 1 / d) ** (d - 1)  # one in d is kept, and where that is none, one more
        assert binomial.as_far_out(int((kept > 1).sum()), len(kept), several) > poisson.FALSE_ALARM or d == 1, name


def test_real_cases_have_the_models_own_weights_and_others_integers() -> None:
    own = _own()
    real, grid = models.initial_parameters(_case(own, "real")), models.initial_parameters(_case(own))
    assert list(real) == list(grid) == [name for name, _ in models.build(_case(own)).named_parameters()]
    assert not torch.equal(real["model.head.weight"], real["model.head.weight"].round())
    assert all(torch.equal(value, value.round()) for value in grid.values())


def test_the_model_itself_gives_the_body_of_the_output() -> None:
    case = _case(_own(), "real")
    model, inputs = models.build(case), batches.inputs(case)
    assert torch.equal(model(inputs)[:, :2], model.get_submodule("model")(inputs))


def test_the_answer_is_autograds_on_the_users_model() -> None:
    case = _case(_own(loss="absolute"))
    answer = oracle.answer(case)
    certificate.prove(case, answer)
    model, inputs, targets = models.build(case).get_submodule("model"), batches.inputs(case), batches.targets(case)
    (model(inputs) - targets).abs().sum().backward()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        assert torch.equal(answer.steps[0].released[f"model.{name}"], parameter.grad)


@pytest.mark.parametrize(("build", "said"), [("untaught", "aten.atan.default"), ("in_float16", "computes in float16")])
def test_what_the_exact_domain_cannot_express_is_named(build: str, said: str) -> None:
    case = _case(_own(build))
    with pytest.raises(NotExact, match=said):
        certificate.prove(case, oracle.answer(case))


@pytest.mark.parametrize(
    ("build", "names", "where"),
    [
        ("right", "", ""),
        ("upcast", "float32", "module front.0 (Rms), operator aten._to_copy.default on float64"),
        ("to_float32", "bfloat16", "module front.0 (Calls), operator aten._to_copy.default on float64"),
        ("autocast", "bfloat16", "module front.0.inner (Linear), operator aten._to_copy.default on float32"),
        ("in_float16", "float16", "module front.0 (Narrow), operator aten._to_copy.default on float64"),
    ],
)
def test_a_model_that_names_a_dtype_is_drawn_in_float32(build: str, names: str, where: str) -> None:
    seen = inspection.inspect(f"{TOYS}:{build}", f"{TOYS}:batch")
    assert (seen.own.names, seen.alone.where) == (names, where)
    assert ("float32" in seen.too_wide(real=False)) == (not names)
    assert any("cases are drawn in float32" in note and where in note for note in seen.notes) == bool(names)
    assert any("or widened to float64" in note for note in seen.notes) == (names == "float32")
    case = user_model_cases.on_model(seen.own, False, TrainingCase(ModelSpec((LayerSpec(1),))))
    assert case.arithmetic.dtype == ("float64" if names in ("", "float32") else "float32")
    assert from_json(case.to_json()) == case
    assert ("names" in case.to_json()) == bool(names)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            "mismatched",
            ("in float32, whose dtype it names", "front.1 (Linear), operator aten.addmm.default on float32"),
        ),
        ("on_two", ("in float64 and in float32", "got     ValueError: two at once", "the loss, or the backward")),
    ],
)
def test_what_raises_on_a_single_device_is_refused_with_its_place(build: str, said: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as refused:
        _own(build)
    assert all(words in str(refused.value) for words in (*said, "own_models.py:"))


@pytest.mark.parametrize(("build", "numbers"), [("upcast", "real"), ("to_float32", "grid")])
def test_a_model_that_names_a_dtype_has_no_case_in_float64(build: str, numbers: str) -> None:
    case = _case(_own(build), numbers)
    with pytest.raises(InvalidCase, match="float32 for a model that names"):
        replace(case, arithmetic=replace(case.arithmetic, dtype="float64"))


def test_dtypes_that_a_model_names_are_proved_and_its_own_dtype_has_the_last_word() -> None:
    """Fractions fit neither 24 bits nor the 8 of a bfloat16; and what the model itself gives otherwise is no answer."""
    for build in ("upcast", "autocast"):
        own = _own(build)
        case = _case(own)
        answer = oracle.answer(case)
        assert certificate.prove(case, answer)
        batched_step.require_same_alone(case, answer)
    step = answer.steps[0]
    other = {name: value + 2.0**-9 for name, value in step.gradients.items()}
    with pytest.raises(NotExact, match="in float32 your model gives other bits on a single device"):
        batched_step.require_same_alone(case, replace(answer, steps=(replace(step, gradients=other),)))
    large = {name: value + 2.0**-9 for name, value in step.before.items()}
    with pytest.raises(NotExact, match=r"had 8"):
        certificate.prove(case, replace(answer, steps=(replace(step, before=large),)))


def test_roundings_count_every_sum() -> None:
    small = _case(_own())
    large = replace(small, layout=BatchLayout("contiguous", 9))
    assert 0 < user_model_roundings.path_roundings(small) < user_model_roundings.path_roundings(large)


def test_a_case_of_a_users_model_goes_through_json() -> None:
    case = _case(_own())
    assert from_json(case.to_json()) == case
    assert "your own" in case.describe()
    assert '"own"' not in TrainingCase(ModelSpec((_LAYER,))).to_json()


_LAYER = LayerSpec(1)


@pytest.mark.parametrize(
    "change", [{"traits": ("hsdp",)}, {"build": "no reference"}, {"features": -1}, {"rows": (1 << 30,)}]
)
def test_a_users_model_that_contradicts_itself_is_no_case(change: dict[str, object]) -> None:
    own = UserModelSpec("mine:build", "mine:batch")
    with pytest.raises(InvalidCase):
        TrainingCase(ModelSpec((), own=replace(own, **change)))  # type: ignore[arg-type]
    with pytest.raises(InvalidCase):
        TrainingCase(ModelSpec((_LAYER,), own=own))


def test_a_trait_that_an_adapter_does_not_accept_is_no_promise() -> None:
    law = chapters()["training.plain"]
    features = replace(adapters.load("fully_shard").features, accepts=frozenset({"bias", "root-parameters"}))
    assert user_model_cases.not_accepted(law.draw, features, (1,), _own(), False) == ""
    said = user_model_cases.not_accepted(law.draw, features, (1,), _own("own_layer"), False)
    assert said == "the adapter does not accept own-layers, which the model demands"


@pytest.mark.parametrize(
    ("kind", "drawn", "compute", "rate"),
    [("adam", 5, "bfloat16", 1), ("adamw", 3, "bfloat16", 1), ("sgd", 3, "bfloat16", 1), ("adam", 5, "dtype", 5)],
)
def test_in_few_bits_adam_moves_parameters_between_steps(kind: Any, drawn: int, compute: Any, rate: int) -> None:
    """At 1/2 what is 1 becomes 0 where it goes down; at a smaller rate no projected parameter moves."""
    own = inspection.inspect(f"{TOYS}:right", f"{TOYS}:batch").own
    step = StepSpec(steps=2, optimizer=OptimizerSpec(kind, drawn, schedule="halving"))
    case = TrainingCase(ModelSpec((LayerSpec(1),)), step=step, arithmetic=Arithmetic("float32", compute=compute))
    moved, alone = (
        user_model_cases.on_model(own, False, replace(case, step=replace(step, steps=steps))).step.optimizer
        for steps in (2, 1)
    )
    assert (moved.lr_exponent, alone.lr_exponent) == (rate, drawn)
    assert (moved.kind, alone.kind) == ("adam" if kind == "sgd" else kind, kind)
