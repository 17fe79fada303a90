"""The arithmetic a case runs in, put in place in this process for the length of a run, on oracle and ranks alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.errors import NotExact
from fsdpcheck.exact import surrogates
from fsdpcheck.exact.surrogates.grids import COARSE, FINE, WHOLE, Grids


def grids_of(case: TrainingCase) -> Grids:
    """On which grids surrogates are, where a case needs them."""
    if case.model.own is None:
        return FINE
    return COARSE if case.arithmetic.compute == "dtype" else WHOLE


@contextmanager
def of(case: Case) -> Iterator[None]:
    """Surrogates in place if the case needs them, and what a GPU may do with products and convolutions (SWITCHES).

    Nothing at all for a case that trains nothing.
    """
    with ExitStack() as stack:
        if isinstance(case, TrainingCase):
            if "surrogates" in case.requires():
                stack.enter_context(surrogates.installed(grids_of(case)))
            stack.enter_context(switched(case))
        yield


@contextmanager
def decided(case: TrainingCase) -> Iterator[None]:
    """The same; raises NotExact on leaving if a value stood so near a rounding decision that kernels might disagree."""
    before = surrogates.doubts.count
    with of(case):
        yield
    if surrogates.doubts.count != before:
        raise NotExact(f"{surrogates.doubts.count - before} values stand within 1e-6 of a rounding decision")


SWITCHES: Final[tuple[tuple[str, Any, str], ...]] = (
    ("products", torch.backends.cuda.matmul, "allow_tf32"),
    ("convolutions", torch.backends.cudnn, "allow_tf32"),
    ("products", torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    ("products", torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
)
"""Of what, who has it, and its name: what a GPU may do, and a CPU does not. It may round factors to TF32, for
convolutions by default; and add up partial sums in bfloat16 or float16, by default, which have 8 or 11 bits in place of
the 24 that are proved."""


@contextmanager
def switched(case: Case) -> Iterator[None]:
    """Every switch off, but for TF32 where a case asks for it; as they were afterwards.

    One that somebody else has changed meanwhile stays: engines open this outside of what compares and names such.
    """
    tf32 = isinstance(case, TrainingCase) and case.arithmetic.compute == "tf32"
    before = [getattr(owner, name) for _, owner, name in SWITCHES]
    for _, owner, name in SWITCHES:
        setattr(owner, name, tf32 and name == "allow_tf32")
    try:
        yield
    finally:
        for (_, owner, name), value in zip(SWITCHES, before, strict=True):
            if getattr(owner, name) == (tf32 and name == "allow_tf32"):
                setattr(owner, name, value)


def switches() -> dict[str, bool]:
    """Each switch as it stands in this process: "products: allow_tf32" -> False."""
    return {f"{what}: {name}": bool(getattr(owner, name)) for what, owner, name in SWITCHES}
