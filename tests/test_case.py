"""Cases: what is refused and how it is said, what is required, words, and the frozen JSON form."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    Case,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    OptimizerSpec,
    OwnModel,
    StepSpec,
    Trait,
)
from fsdpcheck.errors import InvalidCase

SMALLEST = Case(ModelSpec((LayerSpec(1),)))
EVERYTHING = Case(
    ModelSpec(
        (LayerSpec(4, True, "relu"), LayerSpec(3, True, "abs", "all"), LayerSpec(2, False, "hardtanh", "weight")),
        input="tokens",
        features=3,
        length=2,
        vocabulary=4,
        padding_idx=0,
        tied=(-1, 0),
        units=(2, 1),
    ),
    MeshSpec(3, reshard_after_forward=False),
    BatchLayout("ragged", 5, counts=(0, 4, 1)),
    StepSpec("hinge", 2, 2, False, 6, optimizer=OptimizerSpec("sgd", 2, 0.5, 0.25)),
    Arithmetic("float32", 2, 3),
    seed=2**64 - 1,
)
IMAGE = Case(
    ModelSpec(
        (
            LayerSpec(4, True, "gelu", "bias", "conv", 3, 2, 2, 2, 2),
            LayerSpec(4, True, kind="group_norm", groups=2),
            LayerSpec(6, True, "softmax"),
            LayerSpec(6, kind="rms_norm"),
        ),
        "image",
        features=2,
        length=5,
    ),
    MeshSpec(2, 2),
    step=StepSpec(
        "cross_entropy", 3, clipping="unclipped", optimizer=OptimizerSpec("adam", schedule="halving"), resume=True
    ),
    arithmetic=Arithmetic(averaging="premultiply"),
)
ONE_UNIT = ModelSpec((LayerSpec(1),), units=(1,))
BY_UNIT = StepSpec(clipping="exact", clip_groups="units")
FROZEN = (
    '{"version":2,"model":{"layers":[{"width":1,"bias":false,"activation":"identity","frozen":"none","kind":"linear",'
    '"kernel":1,"stride":1,"padding":0,"dilation":1,"groups":1}],'
    '"input":"vector","features":1,"length":1,"vocabulary":2,"padding_idx":null,"layer_norm":false,"tied":null,'
    '"units":[]},"mesh":{"dp_shard":1,"dp_replicate":1,"reshard_after_forward":true},'
    '"layout":{"kind":"contiguous","batch_size":1,"shuffle":false,"drop_last":false,"counts":[]},'
    '"step":{"loss":"mse","steps":1,"micro_batches":1,"sync_every":true,"normaliser":1,"reduction":"sum",'
    '"clipping":"none","clip_norm":1,"norms":"immediate","contribution":"complete","max_grad_norm":null,'
    '"optimizer":{"kind":"sgd","lr_exponent":0,"momentum":0.0,"weight_decay":0.0,"schedule":"constant"},'
    '"resume":false},'
    '"arithmetic":{"dtype":"float64","weights":1,"inputs":1,"project":true,"numbers":"grid","averaging":"divide"},'
    '"seed":0}'
)


VERSION_1 = (
    '{"version":1,"model":{"layers":[{"width":1,"bias":false,"activation":"identity","frozen":"none"}],'
    '"input":"vector","features":1,"length":1,"vocabulary":2,"padding_idx":null,"layer_norm":false,"tied":null,'
    '"units":[]},"mesh":{"dp_shard":1,"dp_replicate":1,"reshard_after_forward":true},'
    '"layout":{"kind":"contiguous","batch_size":1,"shuffle":false,"drop_last":false,"counts":[]},'
    '"step":{"loss":"mse","steps":1,"micro_batches":1,"sync_every":true,"normaliser":1,"reduction":"sum",'
    '"clipping":"none","clip_norm":1,"norms":"immediate","contribution":"complete","max_grad_norm":null,'
    '"optimizer":{"kind":"sgd","lr_exponent":0,"momentum":0.0,"weight_decay":0.0}},'
    '"arithmetic":{"dtype":"float64","weights":1,"inputs":1,"project":true},"seed":0}'
)


def test_the_json_form_is_frozen() -> None:
    assert SMALLEST.to_json() == FROZEN
    assert Case.from_json(FROZEN) == SMALLEST


NOISY = Case(
    ModelSpec((LayerSpec(1),)),
    MeshSpec(2),
    BatchLayout("listed", 3, lists=((2, 2), ())),
    StepSpec(clipping="probe", noise_multiplier=0.5),
)


def test_fields_that_came_later_are_written_only_where_they_say_something() -> None:
    assert all(text in NOISY.to_json() for text in ('"lists":[[2,2],[]]', '"noise_multiplier":0.5'))
    assert not any(text in SMALLEST.to_json() for text in ("lists", "noise"))


@pytest.mark.parametrize("case", [SMALLEST, EVERYTHING, IMAGE, NOISY], ids=["smallest", "everything", "image", "noisy"])
def test_json_gives_the_case_back(case: Case) -> None:
    back = Case.from_json(case.to_json())
    assert back == case
    assert hash(back) == hash(case)
    assert "\n" not in case.to_json()
    assert pickle.loads(pickle.dumps(case)) == case


def _paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value, the root apart."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _copied(data: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
    """A deep copy of ``data``, and the part of it that holds the last key of ``path``."""
    copy = json.loads(json.dumps(data))
    place = copy
    for key in path[:-1]:
        place = place[key]
    return copy, place


WHOLE = json.loads(EVERYTHING.to_json())


def test_a_field_that_came_later_may_be_left_out() -> None:
    """Tokens of this version that are older than the field stay what they were, bit for bit."""
    assert "clip_groups" not in replace(SMALLEST, step=StepSpec(clipping="exact")).to_json()
    case = Case(ONE_UNIT, step=BY_UNIT)
    assert '"clip_groups":"units"' in case.to_json()
    assert Case.from_json(case.to_json()) == case
    said = case.to_json().replace('"clip_groups":"units"', '"clip_groups":"all"')
    assert Case.from_json(said) == replace(case, step=StepSpec(clipping="exact"))
    with pytest.raises(InvalidCase, match=r"case.step.clip_groups: got 7"):
        Case.from_json(case.to_json().replace('"clip_groups":"units"', '"clip_groups":7'))


def test_a_missing_key_is_refused() -> None:
    for path in _paths(WHOLE):
        copy, place = _copied(WHOLE, path)
        del place[path[-1]]
        if isinstance(path[-1], str):
            with pytest.raises(InvalidCase, match="version" if path == ("version",) else "missing"):
                Case.from_json(json.dumps(copy))


@pytest.mark.parametrize("bad", ["__import__('os').abort()", {"x": 1}, [[]], 1e300, -3, 1 << 70], ids=repr)
def test_a_wrong_value_anywhere_is_refused(bad: object) -> None:
    for path in _paths(WHOLE):
        copy, place = _copied(WHOLE, path)
        place[path[-1]] = bad
        with pytest.raises(InvalidCase, match="wanted"):
            Case.from_json(json.dumps(copy))


def test_numbers_and_truths_are_not_confused() -> None:
    other: dict[type, type] = {bool: int, int: bool, float: int}
    for path in _paths(WHOLE):
        copy, place = _copied(WHOLE, path)
        value = place[path[-1]]
        if type(value) in other:
            place[path[-1]] = other[type(value)](value)
            with pytest.raises(InvalidCase, match="wanted"):
                Case.from_json(json.dumps(copy))


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "3", '"x"', "{}", FROZEN[:-1], FROZEN[:40], FROZEN + "x", "[" * 100_000, "9" * 5000,
        FROZEN.replace('"seed":0', '"seed":0,"seed":1'),
        FROZEN.replace('"seed":0', '"seed":0,"more":1'),
        FROZEN.replace('"seed":0', '"seed":NaN'),
        FROZEN.replace('"momentum":0.0', '"momentum":Infinity'),
        FROZEN.replace('"momentum":0.0', '"momentum":1e999'),
        FROZEN.replace('"version":2', '"version":3'),
        FROZEN.replace('"version":2', '"version":true'),
        FROZEN.replace('"mse"', '"\\ud800"'),
        " " * (1 << 21),
    ],
)  # fmt: skip
def test_hostile_text_only_gives_an_error(text: str) -> None:
    with pytest.raises(InvalidCase):
        Case.from_json(text)


def test_the_error_names_version_got_and_wanted() -> None:
    with pytest.raises(InvalidCase, match=r"version: got 7, wanted 2, the one this release reads"):
        Case.from_json(FROZEN.replace('"version":2', '"version":7'))
    with pytest.raises(InvalidCase, match=r"version: got 1, wanted 2, the one this release reads; use a matching"):
        Case.from_json(VERSION_1)
    with pytest.raises(InvalidCase, match=r"case\.step\.loss: got 'cubic', wanted one of mse, linear"):
        Case.from_json(FROZEN.replace('"mse"', '"cubic"'))


WORDS = [
    {"model": ModelSpec((LayerSpec(1, kind="nonsense"),))},  # type: ignore[arg-type]
    {"model": ModelSpec((LayerSpec(1), LayerSpec(1, activation="nonsense")))},  # type: ignore[arg-type]
    {"model": ModelSpec((LayerSpec(1, frozen="nonsense"),))},  # type: ignore[arg-type]
    {"model": ModelSpec((LayerSpec(1),), "nonsense")},  # type: ignore[arg-type]
    {"layout": BatchLayout("nonsense")},  # type: ignore[arg-type]
    {"step": StepSpec("nonsense")},  # type: ignore[arg-type]
    {"arithmetic": Arithmetic(compute="nonsense")},  # type: ignore[arg-type]
    {"step": StepSpec(reduction="nonsense")},  # type: ignore[arg-type]
    {"step": StepSpec(clipping="nonsense")},  # type: ignore[arg-type]
    {"step": StepSpec(norms="nonsense")},  # type: ignore[arg-type]
    {"step": StepSpec(contribution="nonsense")},  # type: ignore[arg-type]
    {"step": StepSpec(clip_groups="nonsense")},  # type: ignore[arg-type]
    {"step": StepSpec(optimizer=OptimizerSpec("nonsense"))},  # type: ignore[arg-type]
    {"step": StepSpec(optimizer=OptimizerSpec(schedule="nonsense"))},  # type: ignore[arg-type]
    {"arithmetic": Arithmetic("nonsense")},  # type: ignore[arg-type]
    {"arithmetic": Arithmetic(numbers="nonsense")},  # type: ignore[arg-type]
    {"arithmetic": Arithmetic(averaging="nonsense")},  # type: ignore[arg-type]
]


@pytest.mark.parametrize("changes", WORDS)
def test_an_unknown_word_in_a_hand_built_case_is_refused(changes: dict[str, Any]) -> None:
    (part,) = changes
    with pytest.raises(InvalidCase, match=rf"{part}.*: got 'nonsense', wanted one of \w+, \w+"):
        replace(SMALLEST, **changes)


def test_every_literal_of_a_case_is_among_the_unknown_words() -> None:
    kinds = (LayerSpec, ModelSpec, MeshSpec, BatchLayout, StepSpec, OptimizerSpec, Arithmetic)
    literals = [hint for kind in kinds for hint in get_type_hints(kind).values() if get_origin(hint) is Literal]
    assert len(literals) == len(WORDS)


TWO = (LayerSpec(2), LayerSpec(2))


def on(kind: str, *layers: LayerSpec, features: int = 2, length: int = 3) -> dict[str, Any]:
    """A model of these layers as what changes in a case."""
    return {"model": ModelSpec(layers, kind, features, length)}  # type: ignore[arg-type]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("step.clip_groups: got 'units'", {"model": ONE_UNIT, "step": StepSpec(clip_groups="units")}),
    ("step.clip_groups: got 'units'", {"step": BY_UNIT}),
    (
        "step.clip_groups: got 'units'",
        {
            "model": ONE_UNIT,
            "step": replace(BY_UNIT, clipping="probe"),
            "arithmetic": Arithmetic(project=False, numbers="real"),
        },
    ),
    ("dp_shard: got 0", {"mesh": MeshSpec(0)}),
    ("world size", {"mesh": MeshSpec(64, 2)}),
    ("number of model.layers", {"model": ModelSpec(())}),
    (r"layers\[0\].width: got 0", {"model": ModelSpec((LayerSpec(0),))}),
    ("model.units", {"model": ModelSpec(TWO, units=(2, 1))}),
    (r"units\[0\]: got 0", {"model": ModelSpec(TWO, units=(0,))}),
    ("padding_idx", {"model": ModelSpec(TWO, padding_idx=0)}),
    ("padding_idx", {"model": ModelSpec(TWO, "tokens", vocabulary=3, padding_idx=3)}),
    ("layer_norm", {"model": ModelSpec(TWO, "tokens", features=2, layer_norm=True)}),
    ("model.features", {"model": ModelSpec(TWO, features=3, layer_norm=True)}),
    ("model.features", {"model": ModelSpec(TWO, features=1, layer_norm=True)}),
    ("model.tied", {"model": ModelSpec(TWO, features=3, tied=(0, 1))}),
    ("model.tied", {"model": ModelSpec(TWO, features=2, tied=(1, 0))}),
    ("model.tied", {"model": ModelSpec(TWO, features=2, tied=(-1, 0))}),
    ("model.tied", {"model": ModelSpec(TWO, features=2, tied=(0, 2))}),
    ("two sharding units", {"model": ModelSpec(TWO, features=2, tied=(0, 1), units=(1, 1))}),
    ("two sharding units", {"model": ModelSpec(TWO, features=2, tied=(0, 1), units=(1,))}),
    ("two sharding units", {"model": ModelSpec(TWO, features=2, tied=(0, 1), layer_norm=True, units=(2, 1))}),
    ("frozen", {"model": ModelSpec((LayerSpec(2), LayerSpec(2, frozen="weight")), features=2, tied=(0, 1))}),
    ("model.tied", {"model": ModelSpec((LayerSpec(2), LayerSpec(2, kind="attention")), "sequence", 2, tied=(0, 1))}),
    ("model.tied", {"model": ModelSpec((LayerSpec(2),), "bags", 2, tied=(-1, 0))}),
    ("layer_norm", {"model": ModelSpec(TWO, "bags", features=2, layer_norm=True)}),
    ("layer_norm", {"model": ModelSpec(TWO, "image", features=2, layer_norm=True)}),
    ("kernel: got 2, wanted 1 for linear", on("vector", LayerSpec(1, kernel=2))),
    ("groups: got 2, wanted 1 for attention", on("sequence", LayerSpec(2, kind="attention", groups=2))),
    ("stride: got 2, wanted 1 for group_norm", on("image", LayerSpec(2, True, kind="group_norm", stride=2))),
    ("kernel: got 0", on("image", LayerSpec(2, kind="conv", kernel=0))),
    ("padding: got -1", on("image", LayerSpec(2, kind="conv", padding=-1))),
    ("stride: got 0", on("image", LayerSpec(2, kind="conv", stride=0))),
    ("dilation: got 0", on("image", LayerSpec(2, kind="conv", dilation=0))),
    ("groups: got 0", on("image", LayerSpec(2, kind="conv", groups=0))),
    ("width: got 3, wanted 2, the width that reaches it", on("vector", LayerSpec(3, kind="rms_norm"))),
    ("width: got 3, wanted 2, the width that reaches it", on("sequence", LayerSpec(3, kind="attention"))),
    ("width: got 2, wanted 6, the width that reaches it", on("signal", LayerSpec(2, kind="layer_norm"))),
    ("bias: got True, wanted False", on("vector", LayerSpec(2, True, kind="rms_norm"))),
    ("positions to attend to", on("vector", LayerSpec(2, kind="attention"))),
    ("positions to attend to", on("image", LayerSpec(18, kind="attention"))),
    ("width, bias: got", on("image", LayerSpec(2, kind="group_norm"))),
    ("width, bias: got", on("image", LayerSpec(4, True, kind="group_norm"))),
    ("no layer on rows before it", on("vector", LayerSpec(2, kind="conv"))),
    ("no layer on rows before it", on("sequence", LayerSpec(2, True, kind="group_norm"))),
    ("no layer on rows before it", on("signal", LayerSpec(2), LayerSpec(2, kind="conv"))),
    ("divides 2 and 3 channels", on("image", LayerSpec(3, kind="conv", groups=2))),
    ("divides 3 and 2 channels", on("image", LayerSpec(2, kind="conv", groups=2), features=3)),
    ("several values", on("image", LayerSpec(2, True, kind="group_norm", groups=2), length=1)),
    ("at least 1 in every direction", on("image", LayerSpec(2, kind="conv", kernel=3, dilation=2))),
    ("layout.counts", {"layout": BatchLayout("ragged", 3, counts=(1, 1))}),
    ("layout.counts", {"layout": BatchLayout("ragged", 3, counts=(4,))}),
    ("layout.counts", {"layout": BatchLayout("strided", 3, counts=(3,))}),
    ("shuffle", {"layout": BatchLayout("strided", 3, shuffle=True)}),
    ("drop_last", {"layout": BatchLayout("replicated", 3, drop_last=True)}),
    ("layout.lists", {"layout": BatchLayout("listed", 3)}),
    ("layout.lists", {"layout": BatchLayout("listed", 3, lists=((0,), (1,)))}),
    ("layout.lists", {"layout": BatchLayout("replicated", 3, lists=((0,), (1,)))}),
    ("layout.lists", {"layout": BatchLayout("strided", 3, lists=((0,),))}),
    ("layout.lists", {"layout": BatchLayout("listed", 3, lists=((3,),))}),
    ("noise_multiplier", {"step": StepSpec(noise_multiplier=1.0)}),
    ("noise_multiplier", {"step": StepSpec(clipping="probe", noise_multiplier=-1.0)}),
    ("batch_size", {"layout": BatchLayout(batch_size=0)}),
    ("normaliser", {"step": StepSpec(normaliser=3)}),
    ("normaliser", {"mesh": MeshSpec(3), "step": StepSpec(normaliser=9)}),
    ("normaliser", {"step": StepSpec(reduction="mean", normaliser=2)}),
    ("reduction", {"layout": BatchLayout(batch_size=3), "step": StepSpec(reduction="mean")}),
    ("reduction", {"layout": BatchLayout("replicated"), "step": StepSpec(reduction="mean")}),
    ("reduction", {"layout": BatchLayout(batch_size=2), "step": StepSpec(micro_batches=2, reduction="mean")}),
    ("reduction", {"mesh": MeshSpec(2), "layout": BatchLayout(batch_size=3), "step": StepSpec(reduction="mean")}),
    ("max_grad_norm", {"step": StepSpec(clipping="exact", max_grad_norm=1.0)}),
    ("max_grad_norm", {"step": StepSpec(max_grad_norm=0.0)}),
    ("norms", {"step": StepSpec(norms="deferred")}),
    ("contribution", {"step": StepSpec(contribution="partial")}),
    ("clip_norm", {"step": StepSpec(clipping="exact", clip_norm=0)}),
    ("momentum", {"step": StepSpec(optimizer=OptimizerSpec(momentum=0.1))}),
    ("momentum", {"step": StepSpec(optimizer=OptimizerSpec("adamw", momentum=0.5))}),
    ("momentum: got 0.5, wanted 0.0 with adam;", {"step": StepSpec(optimizer=OptimizerSpec("adam", momentum=0.5))}),
    ("weight_decay", {"step": StepSpec(optimizer=OptimizerSpec(weight_decay=-0.5))}),
    ("arithmetic.project", {"arithmetic": Arithmetic(numbers="real")}),
    ("arithmetic.compute", {"arithmetic": Arithmetic(compute="bfloat16")}),
    ("arithmetic.compute", {"arithmetic": Arithmetic("float32", project=False, numbers="real", compute="tf32")}),
    ("arithmetic.compute", {"arithmetic": Arithmetic("float32", compute="float16")}),  # type: ignore[arg-type]
    (
        "another family with real numbers",
        {"arithmetic": Arithmetic(project=False, numbers="real"), "step": StepSpec(clipping="exact")},
    ),
    ("weights", {"arithmetic": Arithmetic(weights=0)}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 1 << 64}),
    ("size of the model", {"model": ModelSpec((LayerSpec(4096), LayerSpec(4096)), features=4096)}),
    ("size of the data set", {"model": ModelSpec(TWO, "sequence", 4096, 4096), "layout": BatchLayout(batch_size=4096)}),
    ("size of the model", on("volume", LayerSpec(1), features=1, length=4096)),
    ("size of the data set", on("signal", LayerSpec(4096, kind="conv"), length=4096)),
    ("size of the data set", on("sequence", LayerSpec(1, kind="attention"), features=1, length=4096)),
    ("size of the model", on("volume", LayerSpec(64, kind="conv", kernel=64), length=64)),
]


@pytest.mark.parametrize(("match", "changes"), REFUSED)
def test_a_case_that_contradicts_itself_is_refused(match: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidCase, match=match) as caught:
        replace(SMALLEST, **changes)
    assert "got" in str(caught.value)
    assert "wanted" in str(caught.value)


GROUPED = ModelSpec((LayerSpec(1, True, kind="group_norm"),), "signal", length=2)


def private(model: ModelSpec) -> Case:
    return Case(model, step=StepSpec(clipping="unclipped"))


NEEDED: list[tuple[Trait, Case]] = [
    ("bias", Case(ModelSpec((LayerSpec(1, True),)))),
    ("tokens", Case(ModelSpec((LayerSpec(1),), "tokens"))),
    ("sequence", Case(ModelSpec((LayerSpec(1),), "tokens"))),
    ("sequence", Case(ModelSpec((LayerSpec(1),), "sequence"))),
    ("padding_idx", Case(ModelSpec((LayerSpec(1),), "tokens", padding_idx=1))),
    ("layer-norm", Case(ModelSpec((LayerSpec(1),), features=2, layer_norm=True))),
    ("tied", Case(ModelSpec(TWO, features=2, tied=(0, 1)))),
    (
        "tied-private",
        Case(ModelSpec(TWO, features=2, tied=(0, 1)), step=StepSpec(clipping="probe")),
    ),
    ("frozen", Case(ModelSpec((LayerSpec(1), LayerSpec(1, frozen="weight"))))),
    ("root-parameters", SMALLEST),
    ("keep-unsharded", replace(SMALLEST, mesh=MeshSpec(reshard_after_forward=False))),
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
    ("float32", replace(SMALLEST, arithmetic=Arithmetic("float32"))),
    ("rows<ranks", replace(SMALLEST, mesh=MeshSpec(2))),
    ("uneven-rows", Case(ModelSpec((LayerSpec(3),)), MeshSpec(2))),
    ("uneven-rows", Case(ModelSpec((LayerSpec(2),), "tokens", vocabulary=3), MeshSpec(2))),
    ("uneven-rows", Case(ModelSpec((LayerSpec(3),), features=2, layer_norm=True), MeshSpec(3))),
    ("project", SMALLEST),
    ("conv", Case(ModelSpec((LayerSpec(1, kind="conv"),), "signal"))),
    ("conv", Case(ModelSpec((LayerSpec(1),), "volume"))),
    ("conv-private", private(ModelSpec((LayerSpec(1, kind="conv"),), "image"))),
    ("group-norm", Case(GROUPED)),
    ("group-norm-private", private(GROUPED)),
    ("rms-norm", Case(ModelSpec((LayerSpec(1, kind="rms_norm"),)))),
    ("rms-norm-private", private(ModelSpec((LayerSpec(1, kind="rms_norm"),)))),
    ("layer-norm", Case(ModelSpec((LayerSpec(1, True, kind="layer_norm"),)))),
    ("layer-norm-without-bias", Case(ModelSpec((LayerSpec(1, kind="layer_norm"),)))),
    ("attention", Case(ModelSpec((LayerSpec(1, kind="attention"),), "tokens"))),
    ("attention-private", private(ModelSpec((LayerSpec(1, kind="attention"),), "sequence"))),
    ("bags", Case(ModelSpec((LayerSpec(1),), "bags"))),
    ("bags-private", private(ModelSpec((LayerSpec(1),), "bags"))),
    ("surrogates", Case(ModelSpec((LayerSpec(1, activation="silu"),)))),
    ("surrogates", Case(ModelSpec((LayerSpec(1, kind="layer_norm"),)))),
    ("surrogates", Case(ModelSpec((LayerSpec(1, kind="attention"),), "sequence"))),
    ("surrogates", replace(SMALLEST, step=StepSpec("cross_entropy"))),
    ("real", replace(SMALLEST, arithmetic=Arithmetic(project=False, numbers="real"))),
    ("own-layers", Case(ModelSpec((), own=OwnModel("mine:build", "mine:batch", traits=("own-layers",))))),
    ("premultiply", replace(SMALLEST, arithmetic=Arithmetic(averaging="premultiply"))),
    ("bfloat16", replace(SMALLEST, arithmetic=Arithmetic("float32", compute="bfloat16"))),
    ("tf32", replace(SMALLEST, arithmetic=Arithmetic("float32", compute="tf32"))),
    ("adam", replace(SMALLEST, step=StepSpec(optimizer=OptimizerSpec("adam")))),
    ("schedule", replace(SMALLEST, step=StepSpec(optimizer=OptimizerSpec(schedule="halving")))),
    ("resume", replace(SMALLEST, step=StepSpec(resume=True))),
    ("hsdp", replace(SMALLEST, mesh=MeshSpec(1, 2))),
    ("per-layer-clipping", Case(ONE_UNIT, step=BY_UNIT)),
]


@pytest.mark.parametrize(("trait", "case"), NEEDED)
def test_a_demand_is_named(trait: Trait, case: Case) -> None:
    assert trait in case.requires()


def test_what_a_model_computes_in_is_written_only_where_it_says_something() -> None:
    """Tokens that are older than the field stay what they were; a release that is older names the key it does not know.

    A clip factor below one has more bits than low precision.
    """
    low = replace(SMALLEST, arithmetic=Arithmetic("float32", compute="bfloat16"))
    assert '"compute":"bfloat16"' in low.to_json()
    assert "compute" not in SMALLEST.to_json()
    assert Case.from_json(low.to_json()) == low
    assert "numbers: float32, the model computes in bfloat16, integers" in low.describe()
    for clipping in ("exact", "probe"):
        with pytest.raises(InvalidCase, match=r"step.clipping: got .*computing in bfloat16"):
            replace(low, step=StepSpec(clipping=clipping))  # type: ignore[arg-type]


def test_plain_and_private_demands_of_a_family_exclude_each_other() -> None:
    for trait, case in NEEDED:
        if f"{trait}-private" in get_args(Trait):
            assert f"{trait}-private" not in case.requires()
        if trait.endswith("-private"):
            assert trait.removesuffix("-private") not in case.requires()


def test_real_numbers_keep_the_true_functions() -> None:
    tanh = ModelSpec((LayerSpec(1, activation="tanh"),))
    real = Case(tanh, arithmetic=Arithmetic(project=False, numbers="real"))
    assert real.requires() >= {"real"}
    assert "surrogates" not in real.requires()
    for polynomial in ("identity", "relu", "leaky_relu", "hardtanh", "abs"):
        assert "surrogates" not in Case(ModelSpec((LayerSpec(1, activation=polynomial),))).requires()  # type: ignore[arg-type]


def test_a_layer_norm_with_a_bias_is_not_one_without() -> None:
    biased = ModelSpec((LayerSpec(2, True, kind="layer_norm"),), features=2, layer_norm=True)
    assert "layer-norm-without-bias" not in Case(biased).requires()


def test_every_trait_can_be_demanded_and_the_plainest_case_demands_none() -> None:
    assert {trait for trait, _ in NEEDED} == set(get_args(Trait))
    assert Case(ModelSpec((LayerSpec(1),), units=(1,)), arithmetic=Arithmetic(project=False)).requires() == frozenset()
    even = Case(ModelSpec((LayerSpec(4),), units=(1,)), MeshSpec(2), BatchLayout("sampler", 2, drop_last=True))
    assert even.requires() == {"project"}


def test_words_say_what_a_person_needs_to_know() -> None:
    words = EVERYTHING.describe()
    assert words.count("\n") == 3
    for part in (
        "Embedding(4, 3, padding_idx=0) -> Linear(3, 4, bias) -> relu -> Linear(4, 3, bias, all frozen) -> abs",
        "layers -1 and 0 share one weight",
        "units of 2, 1 layers, 1 left to the root",
        "W = 3, parameters kept unsharded after forward",
        "a batch of 5 samples, ragged as 0+4+1, in 2 micro-batches, gradients reduced after the last",
        "2 steps, plain training; hinge loss, sum over samples, normaliser 6; sgd lr=0.25 momentum=0.5",
        "float32, integers, weights in +-2, inputs in +-3, projected to integers",
    ):
        assert part in words
    clipped = replace(SMALLEST, step=StepSpec(clipping="exact", clip_norm=4, norms="deferred"))
    assert "private, clipping family exact, C = 4, deferred norms" in clipped.describe()
    assert "global gradient norm clipped to 2.0" in replace(SMALLEST, step=StepSpec(max_grad_norm=2.0)).describe()
    words = IMAGE.describe()
    for part in (
        "image inputs [B, 2, 5, 5] -> Conv2d(2, 4, kernel=3, stride=2, padding=2, dilation=2, groups=2, bias,",
        "bias frozen) -> gelu",
        "-> gelu -> GroupNorm(2, 4) -> Flatten -> Linear(36, 6, bias) -> softmax -> RMSNorm(6);",
        "cross_entropy loss",
        "adam lr=1.0, halved after each step, its state saved and loaded after each step",
        "integers and surrogates, weights in +-1",
        "averages premultiplied by 1/W",
    ):
        assert part in words
    model = ModelSpec((LayerSpec(3, True, kind="attention"), LayerSpec(3, kind="layer_norm")), "tokens", 3, 2)
    assert "[B, 2] -> Embedding(2, 3) -> Attention(3, bias) -> LayerNorm(3, no bias);" in Case(model).describe()
    model = ModelSpec((LayerSpec(3),), "bags", 2, 4, padding_idx=0)
    real = Case(model, arithmetic=Arithmetic(project=False, numbers="real"))
    assert "bags inputs [B, 4] -> EmbeddingBag(2, 2, padding_idx=0) -> Linear(2, 3);" in real.describe()
    assert "float64, real numbers, weights in +-1, inputs in +-1;" in real.describe()
