"""Cases written out for tests: the smallest, and some that say something in every part."""

from __future__ import annotations

from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    LayerSpec,
    MeshSpec,
    ModelSpec,
    OptimizerSpec,
    StepSpec,
    TrainingCase,
)

SMALLEST = TrainingCase(ModelSpec((LayerSpec(1),)))


EVERYTHING = TrainingCase(
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


IMAGE = TrainingCase(
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

TWO = (LayerSpec(2), LayerSpec(2))
