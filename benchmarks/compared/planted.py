"""A planted bug: exact replacements in the text of an honest script, and what a reader should be told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.compared.honest import BY_NAME, Honest

Cause = Literal[
    "data", "labels", "steps", "random", "replicas differ", "factor", "weighting", "one rank",
    "last micro-batch only", "not reduced", "wrong group", "clip norm", "option", "state", "checkpoint",
    "precision only", "small error", "other", "none",
]  # fmt: skip

CAUSES: Final[dict[Cause, str]] = {
    "data": "ranks train on other rows than one rank does: some twice, some never, or in another step",
    "labels": "the rows are right and their labels are not",
    "steps": "another number of optimizer steps",
    "random": "random numbers of the training depend on the rank",
    "replicas differ": "copies of a parameter that must be equal differ between ranks",
    "factor": "gradients are wrong by one factor that is common to all: W, 1/W, an axis of the mesh, a count",
    "weighting": "the parts of ranks or micro-batches are right, and are averaged with wrong weights",
    "one rank": "the part of one rank counts alone, is missing, or is scaled",
    "last micro-batch only": "of several micro-batches, only the last is reduced or counted",
    "not reduced": "a gradient or an activation of which each rank has a part is never summed",
    "wrong group": "a reduction runs over another group or axis of the mesh than it should",
    "clip norm": "the norm that gradients are clipped by is not that of the whole gradient",
    "option": "the optimizer or its schedule runs with another learning rate, decay or other option",
    "state": "the optimizer's state, or an average of weights, is not what one rank has",
    "checkpoint": "what is saved or loaded again is incomplete, or of one rank",
    "precision only": "right but for rounding: a lower precision than the script has on one rank",
    "small error": "a relative error of a known size in the part of one rank",
    "other": "none of these",
    "none": "a harmless change: nothing may be reported",
}

Observable = Literal["data", "labels", "steps", "loss", "gradient", "norm", "option", "state", "parameter", "file", ""]
"""What first differs between the runs; "" for a harmless change."""


@dataclass(frozen=True)
class Bug:
    """One bug. ``edits``: (old, new) pairs; each old text occurs exactly once in the script.

    ``truth``: what a reader should be told, in words. ``cause``: of ``CAUSES``. ``first``: what first differs.
    ``ranks``: the numbers of ranks, above the first, at which it shows. ``fails``: how the run ends where it does not
    come to its end; "" for a run that does. ``size``: of a small error, the relative error that is planted, else None.
    ``source``: where such a bug was seen, if it is known.
    """

    name: str
    script: str
    cause: Cause
    first: Observable
    truth: str
    edits: tuple[tuple[str, str], ...]
    ranks: tuple[int, ...] = ()
    fails: str = ""
    size: float | None = None
    source: str = ""

    @property
    def harmless(self) -> bool:
        return self.cause == "none"

    @property
    def honest(self) -> Honest:
        return BY_NAME[self.script]

    def text(self) -> str:
        """The script with the bug. Raises ValueError for an old text that does not occur exactly once."""
        text = self.honest.path.read_text(encoding="utf-8")
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} occurs {text.count(old)} times in {self.script}, wanted once")
            text = text.replace(old, new)
        return text
