"""Cases of samplers and kernels: their text has the keys of a training case, which may say nothing there."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, replace
from typing import Any

import pytest

from fsdpcheck.case import Case, KernelCase, KernelSpec, MeshSpec, SamplerCase, SamplingSpec, from_json, user_model
from fsdpcheck.errors import InvalidCase
from tests.common.cases_by_hand import SMALLEST
from tests.common.tables import each

SAMPLER = SamplerCase(SamplingSpec(records=7, epochs=2, shards="replicated"), MeshSpec(3, 2), 5)
KERNEL = KernelCase(KernelSpec(positions=3, repeated=True), 7)


def text_of(case: Case, **changes: object) -> str:
    return json.dumps({**json.loads(case.to_json()), **changes})


def test_the_json_form_is_that_of_a_training_case_and_one_key_more() -> None:
    mesh = {"dp_shard": 3, "dp_replicate": 2, "reshard_after_forward": True}
    beside = {**json.loads(SMALLEST.to_json()), "mesh": mesh, "seed": 5}
    assert json.loads(SAMPLER.to_json()) == {**beside, "sampling": asdict(SAMPLER.sampling)}
    assert list(json.loads(SAMPLER.to_json())) == [*json.loads(SMALLEST.to_json()), "sampling"]
    assert list(json.loads(KERNEL.to_json())) == [*json.loads(SMALLEST.to_json()), "kernel"]
    assert KERNEL.to_json().endswith('"bound":1,"exponents":[0,0],"spoil":"none","repeated":true}}')


@each("case", [SAMPLER, KERNEL])
def test_json_gives_the_case_back(case: Case) -> None:
    back = from_json(case.to_json())
    assert back == case == pickle.loads(pickle.dumps(case))
    assert hash(back) == hash(case)
    assert user_model(case) is None


def test_a_key_that_says_that_nothing_is_asked_for_may_stand_there() -> None:
    assert from_json(text_of(SMALLEST, sampling=None, kernel=None)) == SMALLEST
    assert from_json(text_of(SAMPLER, kernel=None)) == SAMPLER


def test_what_a_case_demands_and_says() -> None:
    assert SAMPLER.requires() == {"hsdp", "replicated", "wrap-around"}
    assert "7 records in shares of equal length" in SAMPLER.describe()
    assert SAMPLER.world_size == 6
    assert KERNEL.requires() == frozenset()
    assert KERNEL.describe().startswith("kernel: activations [1, 3, 1] float32 contiguous")
    assert KERNEL.world_size == 1


SMALLEST_PARTS: dict[str, Any] = json.loads(SMALLEST.to_json())
OTHERS: list[dict[str, Any]] = [
    {"model": {**SMALLEST_PARTS["model"], "features": 2}},
    {"mesh": {**SMALLEST_PARTS["mesh"], "reshard_after_forward": False}},
    {"layout": {**SMALLEST_PARTS["layout"], "batch_size": 2}},
    {"step": {**SMALLEST_PARTS["step"], "steps": 2}},
    {"arithmetic": {**SMALLEST_PARTS["arithmetic"], "weights": 2}},
]


@each("case", [SAMPLER, KERNEL])
@each("changes", OTHERS)
def test_a_text_that_says_something_of_training_is_refused(case: Case, changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(InvalidCase, match=rf"{name}: got .* where nothing is trained; leave it out"):
        from_json(text_of(case, **changes))


REFUSED = [
    ("sampling, kernel: got 'both', wanted one of them", text_of(SAMPLER, kernel=asdict(KERNEL.kernel))),
    ("mesh: got .* where nothing is trained", text_of(KERNEL, mesh={**SMALLEST_PARTS["mesh"], "dp_shard": 2})),
    ("case.sampling: got .unknown keys", text_of(SAMPLER, sampling={"records": 3})),
    ("case.kernel: got 3, wanted an object", text_of(KERNEL, kernel=3)),
    ("missing keys", json.dumps({"version": 2, "sampling": asdict(SAMPLER.sampling)})),
    ("unknown keys", text_of(SAMPLER, samplings=1)),
]  # fmt: skip


@each(("match", "text"), REFUSED)
def test_a_text_of_no_case_is_refused(match: str, text: str) -> None:
    with pytest.raises(InvalidCase, match=match):
        from_json(text)


CONTRADICTIONS: list[tuple[str, Case, dict[str, Any]]] = [
    (r"sampling\.rate: got 0.0", SAMPLER, {"sampling": SamplingSpec(rate=0.0)}),
    (r"sampling\.kind: got 'nonsense', wanted one of", SAMPLER, {"sampling": SamplingSpec("nonsense")}),  # type: ignore[arg-type]
    ("mesh: got .* where nothing is trained", SAMPLER, {"mesh": MeshSpec(3, 2, False)}),
    ("world size", SAMPLER, {"mesh": MeshSpec(64, 2)}),
    ("seed: got -1", SAMPLER, {"seed": -1}),
    (r"kernel\.bound", KERNEL, {"kernel": KernelSpec(bound=0)}),
    ("spoiled", KERNEL, {"kernel": KernelSpec(positions=0, spoil="nan")}),
    ("seed: got", KERNEL, {"seed": 1 << 64}),
]


@each(("match", "case", "changes"), CONTRADICTIONS)
def test_a_case_that_contradicts_itself_is_refused(match: str, case: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidCase, match=match):
        replace(case, **changes)
