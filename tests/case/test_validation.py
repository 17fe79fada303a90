"""A case that says something unknown, or contradicts itself, is refused with what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_origin, get_type_hints

import pytest

from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, OptimizerSpec, StepSpec
from fsdpcheck.errors import InvalidCase
from tests.common.cases_by_hand import BY_UNIT, ONE_UNIT, SMALLEST, TWO
from tests.common.tables import each

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
    {"step": StepSpec(evaluates="nonsense")},  # type: ignore[arg-type]
    {"step": StepSpec(across="nonsense")},  # type: ignore[arg-type]
    {"step": StepSpec(optimizer=OptimizerSpec(groups="nonsense"))},  # type: ignore[arg-type]
    {"model": ModelSpec((LayerSpec(1, used="nonsense"),))},  # type: ignore[arg-type]
    {"model": ModelSpec((LayerSpec(1),), bags="nonsense")},  # type: ignore[arg-type]
    {"model": ModelSpec((LayerSpec(1, padding_mode="nonsense"),))},  # type: ignore[arg-type]
    {"model": ModelSpec((LayerSpec(1, mask="nonsense"),))},  # type: ignore[arg-type]
    {"step": StepSpec(optimizer=OptimizerSpec("nonsense"))},  # type: ignore[arg-type]
    {"step": StepSpec(optimizer=OptimizerSpec(schedule="nonsense"))},  # type: ignore[arg-type]
    {"arithmetic": Arithmetic("nonsense")},  # type: ignore[arg-type]
    {"arithmetic": Arithmetic(numbers="nonsense")},  # type: ignore[arg-type]
    {"arithmetic": Arithmetic(averaging="nonsense")},  # type: ignore[arg-type]
]


@each("changes", WORDS)
def test_an_unknown_word_in_a_hand_built_case_is_refused(changes: dict[str, Any]) -> None:
    (part,) = changes
    with pytest.raises(InvalidCase, match=rf"{part}.*: got 'nonsense', wanted one of \w+, \w+"):
        replace(SMALLEST, **changes)


def test_every_literal_of_a_case_is_among_the_unknown_words() -> None:
    kinds = (LayerSpec, ModelSpec, MeshSpec, BatchLayout, StepSpec, OptimizerSpec, Arithmetic)
    literals = [hint for kind in kinds for hint in get_type_hints(kind).values() if get_origin(hint) is Literal]
    assert len(literals) == len(WORDS)


def attending(width: int, heads: int) -> dict[str, Any]:
    layer = LayerSpec(width, kind="attention", heads=heads)
    return {"model": ModelSpec((layer,), "sequence", features=width)}


def on(kind: str, *layers: LayerSpec, features: int = 2, length: int = 3) -> dict[str, Any]:
    """A model of these layers as what changes in a case."""
    return {"model": ModelSpec(layers, kind, features, length)}  # type: ignore[arg-type]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("step.clip_groups: got 'units'", {"model": ONE_UNIT, "step": StepSpec(clip_groups="units")}),
    ("step.clip_groups: got 'units'", {"step": BY_UNIT}),
    (
        "step.unequal: got True",
        {"step": StepSpec(micro_batches=2, sync_every=False, unequal=True), "mesh": MeshSpec(1)},
    ),
    ("step.unequal: got True", {"step": StepSpec(micro_batches=2, unequal=True)}),
    ("step.unequal: got True", {"step": StepSpec(sync_every=False, unequal=True)}),
    ("step.secure_noise: got True", {"step": StepSpec(secure_noise=True)}),
    ("step.across: got 'targets'", {"step": StepSpec(across="targets")}),
    ("step.thaws: got True", {"step": StepSpec(thaws=True)}),
    ("step.refreezes: got True", {"step": StepSpec(steps=3, refreezes=True)}),
    ("step.optimizer.groups: got 'last unit", {"step": StepSpec(optimizer=OptimizerSpec(groups="last unit apart"))}),
    ("step.refreezes: got True", {"step": StepSpec(steps=2, thaws=True, refreezes=True)}),
    ("step.thaws: got True", {"step": StepSpec(steps=2, clipping="exact", thaws=True)}),
    (
        "step.clip_groups: got 'units'",
        {
            "model": ONE_UNIT,
            "step": replace(BY_UNIT, clipping="probe"),
            "arithmetic": Arithmetic(project=False, numbers="real"),
        },
    ),
    ("dp_shard: got 0", {"mesh": MeshSpec(0)}),
    ("goes_on_at: got 65", {"mesh": MeshSpec(goes_on_at=65)}),
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
    ("layout.lists", {"layout": BatchLayout("by-replica", 3, lists=((0,), (1,)))}),
    ("layout.lists", {"layout": BatchLayout("strided", 3, lists=((0,),))}),
    ("layout.lists", {"layout": BatchLayout("listed", 3, lists=((3,),))}),
    ("noise_multiplier", {"step": StepSpec(noise_multiplier=1.0)}),
    ("noise_multiplier", {"step": StepSpec(clipping="probe", noise_multiplier=-1.0)}),
    ("batch_size", {"layout": BatchLayout(batch_size=0)}),
    ("normaliser", {"step": StepSpec(normaliser=3)}),
    ("normaliser", {"mesh": MeshSpec(3), "step": StepSpec(normaliser=9)}),
    ("normaliser", {"mesh": MeshSpec(3), "step": StepSpec(normaliser=2.5)}),
    ("normaliser", {"step": StepSpec(normaliser=2.0)}),
    ("normaliser", {"step": StepSpec(normaliser=0.0)}),
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
    ("weight_decay 0.5', wanted plain", {"step": StepSpec(optimizer=OptimizerSpec("newton_schulz", weight_decay=0.5))}),
    ("plain training without decay", {"step": StepSpec(clipping="exact", optimizer=OptimizerSpec("newton_schulz"))}),
    ("plain training without decay", {"step": StepSpec(max_grad_norm=1.0, optimizer=OptimizerSpec("newton_schulz"))}),
    (
        "a grid in float64",
        {"arithmetic": Arithmetic("float32"), "step": StepSpec(optimizer=OptimizerSpec("newton_schulz"))},
    ),
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
    (r"layers\[0\].used: got 'routed'", {"model": ModelSpec((LayerSpec(2, used="routed"),))}),
    (r"layers\[0\].used: got 'twice'", on("signal", LayerSpec(2, kind="conv", used="twice"))),
    (r"layers\[0\].used: got 'dropped'", {"model": ModelSpec((LayerSpec(2, used="dropped"),))}),
    (r"layers\[0\].heads: got 2, wanted 0 for linear", {"model": ModelSpec((LayerSpec(2, heads=2),))}),
    (r"layers\[0\].heads: got 2, wanted .* divides 3", attending(3, 2)),
    (r"layers\[0\].heads: got -1, wanted", attending(3, -1)),
    (r"layers\[0\].same: got True", on("signal", LayerSpec(1, kind="conv", padding=1, same=True))),
    (r"layers\[0\].same: got True", on("signal", LayerSpec(1, kind="conv", stride=2, same=True))),
    (r"layers\[0\].same: got True", {"model": ModelSpec((LayerSpec(1, same=True),))}),
    (r"layers\[0\].mask: got 'causal', wanted .* without heads", {"model": ModelSpec((LayerSpec(2, mask="causal"),))}),
    (
        "model.layers.mask: got 'keys of each sample', wanted .* with real numbers",
        {
            "model": ModelSpec((LayerSpec(2, kind="attention", heads=2, mask="both"),), "sequence", features=2),
            "arithmetic": Arithmetic(project=False, numbers="real"),
        },
    ),
    (
        r"layers\[0\].padding_mode: got 'reflect', wanted zeros for linear",
        {"model": ModelSpec((LayerSpec(1, padding_mode="reflect"),))},
    ),
    (
        r"layers\[0\].padding_mode: got 'circular with 0', wanted .* less than 3",
        on("signal", LayerSpec(1, kind="conv", padding_mode="circular")),
    ),
    (
        r"layers\[0\].padding_mode: got 'reflect with 3', wanted .* less than 3",
        on("signal", LayerSpec(1, kind="conv", padding=3, padding_mode="reflect")),
    ),
    (
        r"layers\[0\].padding_mode: got 'reflect with 4', wanted .* less than 3",
        on("signal", LayerSpec(1, kind="conv", kernel=3, dilation=2, same=True, padding_mode="reflect")),
    ),
    ("model.bare_units: got 'True with units", {"model": ModelSpec((LayerSpec(1),), bare_units=True)}),
    ("model.bare_units", {"model": ModelSpec((LayerSpec(1), LayerSpec(1)), units=(2,), bare_units=True)}),
    ("model.bare_units", {"model": ModelSpec((LayerSpec(1, used="twice"),), units=(1,), bare_units=True)}),
    (
        "model.bare_units: .* tied",
        {"model": ModelSpec((LayerSpec(1), LayerSpec(1)), units=(1, 1), tied=(0, 1), bare_units=True)},
    ),
    (
        "step.clip_groups: got 'units'",
        {
            "model": ModelSpec((LayerSpec(1),), units=(1,), bare_units=True),
            "step": StepSpec(clipping="exact", clip_groups="units"),
        },
    ),
    ("model.bags: got 'mean'", {"model": ModelSpec((LayerSpec(1),), bags="mean")}),
    ("model.tied", {"model": ModelSpec((LayerSpec(1), LayerSpec(1, used="twice")), tied=(0, 1))}),
    (
        "model.layers, used",
        {
            "model": ModelSpec((LayerSpec(1, used="routed"),)),
            "arithmetic": Arithmetic(project=False, numbers="real"),
        },
    ),
    ("size of the model", {"model": ModelSpec((LayerSpec(4096), LayerSpec(4096)), features=4096)}),
    ("size of the data set", {"model": ModelSpec(TWO, "sequence", 4096, 4096), "layout": BatchLayout(batch_size=4096)}),
    ("size of the model", on("volume", LayerSpec(1), features=1, length=4096)),
    ("size of the data set", on("signal", LayerSpec(4096, kind="conv"), length=4096)),
    ("size of the data set", on("sequence", LayerSpec(1, kind="attention"), features=1, length=4096)),
    ("size of the model", on("volume", LayerSpec(64, kind="conv", kernel=64), length=64)),
]


@each(("match", "changes"), REFUSED)
def test_a_case_that_contradicts_itself_is_refused(match: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidCase, match=match) as caught:
        replace(SMALLEST, **changes)
    assert "got" in str(caught.value)
    assert "wanted" in str(caught.value)
