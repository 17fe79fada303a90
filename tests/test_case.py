"""Cases: what is refused and how it is said, what is required, words, and the frozen JSON form."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest

from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    Case,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    OptimizerSpec,
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
FROZEN = (
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


@pytest.mark.parametrize("case", [SMALLEST, EVERYTHING], ids=["smallest", "everything"])
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
        FROZEN.replace('"version":1', '"version":2'),
        FROZEN.replace('"version":1', '"version":true'),
        FROZEN.replace('"mse"', '"\\ud800"'),
        " " * (1 << 21),
    ],
)  # fmt: skip
def test_hostile_text_only_gives_an_error(text: str) -> None:
    with pytest.raises(InvalidCase):
        Case.from_json(text)


def test_the_error_names_version_got_and_wanted() -> None:
    with pytest.raises(InvalidCase, match=r"version: got 7, wanted 1"):
        Case.from_json(FROZEN.replace('"version":1', '"version":7'))
    with pytest.raises(InvalidCase, match=r"case\.step\.loss: got 'cubic', wanted one of mse, linear"):
        Case.from_json(FROZEN.replace('"mse"', '"cubic"'))


TWO = (LayerSpec(2), LayerSpec(2))
REFUSED: list[tuple[str, dict[str, Any]]] = [
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
    ("layout.counts", {"layout": BatchLayout("ragged", 3, counts=(1, 1))}),
    ("layout.counts", {"layout": BatchLayout("ragged", 3, counts=(4,))}),
    ("layout.counts", {"layout": BatchLayout("strided", 3, counts=(3,))}),
    ("shuffle", {"layout": BatchLayout("strided", 3, shuffle=True)}),
    ("drop_last", {"layout": BatchLayout("replicated", 3, drop_last=True)}),
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
    ("weight_decay", {"step": StepSpec(optimizer=OptimizerSpec(weight_decay=-0.5))}),
    ("weights", {"arithmetic": Arithmetic(weights=0)}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 1 << 64}),
    ("size of the model", {"model": ModelSpec((LayerSpec(4096), LayerSpec(4096)), features=4096)}),
    ("size of the data set", {"model": ModelSpec(TWO, "sequence", 4096, 4096), "layout": BatchLayout(batch_size=4096)}),
]


@pytest.mark.parametrize(("match", "changes"), REFUSED)
def test_a_case_that_contradicts_itself_is_refused(match: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidCase, match=match) as caught:
        replace(SMALLEST, **changes)
    assert "got" in str(caught.value)
    assert "wanted" in str(caught.value)


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
    ("hsdp", replace(SMALLEST, mesh=MeshSpec(1, 2))),
]


@pytest.mark.parametrize(("trait", "case"), NEEDED)
def test_a_demand_is_named(trait: Trait, case: Case) -> None:
    assert trait in case.requires()


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
        "batch of 5, ragged as 0+4+1, in 2 micro-batches, gradients reduced after the last",
        "2 steps, plain training; hinge loss, sum, N = 6; sgd lr=0.25 momentum=0.5 weight_decay=0.25",
        "float32, weights in +-2, inputs in +-3, projected to integers",
    ):
        assert part in words
    private = replace(SMALLEST, step=StepSpec(clipping="exact", clip_norm=4, norms="deferred"))
    assert "private, clipping family exact, C = 4, deferred norms" in private.describe()
    assert "global gradient norm clipped to 2.0" in replace(SMALLEST, step=StepSpec(max_grad_norm=2.0)).describe()
