"""Cases: what is refused and how it is said, what is required, words, and the frozen JSON form."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase, from_json
from fsdpcheck.errors import InvalidCase
from tests.common.cases_by_hand import BY_UNIT, EVERYTHING, IMAGE, ONE_UNIT, SMALLEST
from tests.common.tables import each

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
    assert from_json(FROZEN) == SMALLEST


NOISY = TrainingCase(
    ModelSpec((LayerSpec(1),)),
    MeshSpec(2),
    BatchLayout("listed", 3, lists=((2, 2), ())),
    StepSpec(clipping="probe", noise_multiplier=0.5),
)


def test_fields_that_came_later_are_written_only_where_they_say_something() -> None:
    assert all(text in NOISY.to_json() for text in ('"lists":[[2,2],[]]', '"noise_multiplier":0.5'))
    assert not any(text in SMALLEST.to_json() for text in ("lists", "noise"))


def test_a_normaliser_is_written_as_the_number_that_it_is() -> None:
    half = replace(SMALLEST, mesh=MeshSpec(3), step=replace(SMALLEST.step, normaliser=1.5))
    assert '"normaliser":1.5' in half.to_json()
    assert from_json(half.to_json()) == half
    for wrong in ("1.0", "NaN", "true", '"1"', "null", "1e999", "1" + "0" * 400):
        with pytest.raises(InvalidCase):
            from_json(half.to_json().replace('"normaliser":1.5', f'"normaliser":{wrong}'))


@pytest.mark.parametrize("case", [SMALLEST, EVERYTHING, IMAGE, NOISY], ids=["smallest", "everything", "image", "noisy"])
def test_json_gives_the_case_back(case: TrainingCase) -> None:
    back = from_json(case.to_json())
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
    case = TrainingCase(ONE_UNIT, step=BY_UNIT)
    assert '"clip_groups":"units"' in case.to_json()
    assert from_json(case.to_json()) == case
    said = case.to_json().replace('"clip_groups":"units"', '"clip_groups":"all"')
    assert from_json(said) == replace(case, step=StepSpec(clipping="exact"))
    with pytest.raises(InvalidCase, match=r"case.step.clip_groups: got 7"):
        from_json(case.to_json().replace('"clip_groups":"units"', '"clip_groups":7'))


def test_a_missing_key_is_refused() -> None:
    for path in _paths(WHOLE):
        copy, place = _copied(WHOLE, path)
        del place[path[-1]]
        if isinstance(path[-1], str):
            with pytest.raises(InvalidCase, match="version" if path == ("version",) else "missing"):
                from_json(json.dumps(copy))


@pytest.mark.parametrize("bad", ["__import__('os').abort()", {"x": 1}, [[]], 1e300, -3, 1 << 70], ids=repr)
def test_a_wrong_value_anywhere_is_refused(bad: object) -> None:
    for path in _paths(WHOLE):
        copy, place = _copied(WHOLE, path)
        place[path[-1]] = bad
        with pytest.raises(InvalidCase, match="wanted"):
            from_json(json.dumps(copy))


def test_numbers_and_truths_are_not_confused() -> None:
    other: dict[type, type] = {bool: int, int: bool, float: int}
    for path in _paths(WHOLE):
        copy, place = _copied(WHOLE, path)
        value = place[path[-1]]
        if type(value) in other:
            place[path[-1]] = other[type(value)](value)
            with pytest.raises(InvalidCase, match="wanted"):
                from_json(json.dumps(copy))


@each(
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
        from_json(text)


def test_the_error_names_version_got_and_wanted() -> None:
    with pytest.raises(InvalidCase, match=r"version: got 7, wanted 2, the one this release reads"):
        from_json(FROZEN.replace('"version":2', '"version":7'))
    with pytest.raises(InvalidCase, match=r"version: got 1, wanted 2, the one this release reads; use a matching"):
        from_json(VERSION_1)
    with pytest.raises(InvalidCase, match=r"case\.step\.loss: got 'cubic', wanted one of mse, linear"):
        from_json(FROZEN.replace('"mse"', '"cubic"'))


def test_what_a_model_computes_in_is_written_only_where_it_says_something() -> None:
    """Tokens that are older than the field stay what they were; a release that is older names the key it does not know.

    The proof of low precision knows one factor a sample.
    """
    low = replace(SMALLEST, arithmetic=Arithmetic("float32", compute="bfloat16"))
    assert '"compute":"bfloat16"' in low.to_json()
    assert "compute" not in SMALLEST.to_json()
    assert from_json(low.to_json()) == low
    assert "numbers: float32, the model computes in bfloat16, integers" in low.describe()
    in_units = replace(low, model=replace(low.model, units=(1,)), step=StepSpec(clipping="exact"))
    with pytest.raises(InvalidCase, match=r"step.clip_groups: got 'units', wanted \"all\", computing in bfloat16"):
        replace(in_units, step=replace(in_units.step, clip_groups="units"))


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
    assert "[B, 2] -> Embedding(2, 3) -> Attention(3, bias) -> LayerNorm(3, no bias);" in TrainingCase(model).describe()
    model = ModelSpec((LayerSpec(3),), "bags", 2, 4, padding_idx=0)
    real = TrainingCase(model, arithmetic=Arithmetic(project=False, numbers="real"))
    assert "bags inputs [B, 4] -> EmbeddingBag(2, 2, padding_idx=0) -> Linear(2, 3);" in real.describe()
    assert "float64, real numbers, weights in +-1, inputs in +-1;" in real.describe()
