"""The arithmetic a case runs in, put in place in this process for the length of a run, on oracle and ranks alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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
    """Surrogates in place if the case needs them.

    And in low precision what a GPU may do with products of matrices: nothing of it concerns a CPU. Nothing at all for a
    case that trains nothing.
    """
    with ExitStack() as stack:
        if isinstance(case, TrainingCase) and "surrogates" in case.requires():
            stack.enter_context(surrogates.installed(grids_of(case)))
        if isinstance(case, TrainingCase) and case.arithmetic.compute != "dtype":
            stack.enter_context(_products(tf32=case.arithmetic.compute == "tf32"))
        yield


@contextmanager
def decided(case: TrainingCase) -> Iterator[None]:
    """The same; raises NotExact on leaving if a value stood so near a rounding decision that kernels might disagree."""
    before = surrogates.doubts.count
    with of(case):
        yield
    if surrogates.doubts.count != before:
        raise NotExact(f"{surrogates.doubts.count - before} values stand within 1e-6 of a rounding decision")


@contextmanager
def _products(tf32: bool) -> Iterator[None]:
    """cuBLAS may round factors to TF32, or may not, and may not add up partial sums in bfloat16 (which is allowed by
    default, and then sums have 8 bits instead of the 24 that are proved)."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = tf32, False
    try:
        yield
    finally:
        matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = before
