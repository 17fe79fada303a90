"""The arithmetic a case runs in, put in place in this process for the length of a run, on oracle and ranks alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdpcheck.case import Case
from fsdpcheck.errors import NotExact
from fsdpcheck.exact import surrogates


@contextmanager
def of(case: Case) -> Iterator[None]:
    """Surrogates in place if the case needs them; coarse ones for a user's model, which may be deep."""
    if "surrogates" in case.requires():
        with surrogates.installed(coarse=case.model.own is not None):
            yield
    else:
        yield


@contextmanager
def decided(case: Case) -> Iterator[None]:
    """The same; raises NotExact on leaving if a value stood so near a rounding decision that kernels might disagree."""
    before = surrogates.doubts.count
    with of(case):
        yield
    if surrogates.doubts.count != before:
        raise NotExact(f"{surrogates.doubts.count - before} values stand within 1e-6 of a rounding decision")
