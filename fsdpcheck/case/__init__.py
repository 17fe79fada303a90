"""Case: every input that decides the answer of one check, as frozen data with a versioned JSON form.

Ranks train a model in it, or deal out records by a sampler, or one process calls a kernel. Nothing here computes:
workload/models.py, workload/batches.py and case/prng.py build what a case describes.
"""

from __future__ import annotations

import dataclasses

from fsdpcheck.case import serialization
from fsdpcheck.case.kernel import KernelCase, KernelSpec
from fsdpcheck.case.model import Activation, Freeze, InputKind, LayerKind, LayerSpec, ModelSpec, Named, UserModelSpec
from fsdpcheck.case.refusal import refuse
from fsdpcheck.case.sampler import SamplerCase, SamplingSpec
from fsdpcheck.case.serialization import VERSION
from fsdpcheck.case.training import (
    FILLER,
    Arithmetic,
    Averaging,
    BatchLayout,
    ClipGroups,
    Clipping,
    Compute,
    Contribution,
    Dtype,
    LayoutKind,
    Loss,
    MeshSpec,
    NormMode,
    Numbers,
    OptimizerKind,
    OptimizerSpec,
    Schedule,
    StepSpec,
    TrainingCase,
)
from fsdpcheck.case.vocabulary import Trait

Case = TrainingCase | SamplerCase | KernelCase
"""All have ``world_size``, ``seed``, ``requires()``, ``describe()`` and ``to_json()``."""


def from_json(text: str) -> Case:
    """The case that a text names; the inverse of ``to_json``. Nothing of the text is run.

    Raises InvalidCase for anything else: unknown, missing or repeated keys, wrong types, numbers out of range, another
    version, and a case that trains nothing with what says something of training.
    """
    data = serialization.read(text)
    sampling = serialization.value(SamplingSpec | None, data.pop("sampling", None), "case.sampling")
    kernel = serialization.value(KernelSpec | None, data.pop("kernel", None), "case.kernel")
    case: TrainingCase = serialization.value(TrainingCase, data, "case")
    if sampling is None and kernel is None:
        return case
    if sampling is not None and kernel is not None:
        refuse("sampling, kernel", "both", "one of them", "make two cases")
    _require_filler(case, case.mesh if kernel is None else FILLER.mesh)
    return SamplerCase(sampling, case.mesh, case.seed) if kernel is None else KernelCase(kernel, case.seed)


def _require_filler(case: TrainingCase, mesh: MeshSpec) -> None:
    """Refuse what a case that trains nothing has beside its sampler or kernel, if it says something but ``mesh``."""
    wanted = dataclasses.replace(FILLER, mesh=mesh, seed=case.seed)
    for name in (field.name for field in dataclasses.fields(case)):
        if getattr(case, name) != getattr(wanted, name):
            refuse(name, getattr(case, name), f"{getattr(wanted, name)} where nothing is trained", "leave it out")


def user_model(case: Case) -> UserModelSpec | None:
    """The model of a user's own that a case trains, if it does."""
    return case.model.own if isinstance(case, TrainingCase) else None


__all__ = [
    "VERSION", "Activation", "Arithmetic", "Averaging", "BatchLayout", "Case", "ClipGroups", "Clipping", "Compute",
    "Contribution", "Dtype", "Freeze", "InputKind", "KernelCase", "KernelSpec", "LayerKind", "LayerSpec", "LayoutKind",
    "Loss", "MeshSpec", "ModelSpec", "Named", "NormMode", "Numbers", "OptimizerKind", "OptimizerSpec", "SamplerCase",
    "SamplingSpec", "Schedule", "StepSpec", "TrainingCase", "Trait", "UserModelSpec", "from_json", "user_model",
]  # fmt: skip
