"""Ten planted mistakes of ten roots: what ``fsdpcheck run`` prints of each at an earlier commit, and here.

``python -m benchmarks before-after CHECKOUT [GLOB]``, with CHECKOUT a worktree of EARLIER. The ten follow from a rule,
and were committed before anything was printed: of ten modules of ``impl/faults``, one for each part of a step, the
first fault by name that both commits plant in the reference alike, and whose law is written out and is that of no
module before.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

EARLIER: Final = "c9481682"
"""The commit of the side "before", of 22 November 2026."""
HERE: Final = Path(__file__).parents[1]


@dataclass(frozen=True)
class Planted:
    """A fault, its module of ``impl/faults``, the part of a step that the module is about, and the law that asks."""

    module: str
    part: str
    fault: str
    law: str


TEN: Final = (
    Planted("samplers", "which samples are drawn", "batches_of_one_size", "samplers.poisson-law"),
    Planted("order", "the order of collectives", "deferred_norms_gather", "deferred.completes"),
    Planted("layers", "the norm rule of a layer", "bag_tokens_not_merged", "clipping.norms"),
    Planted("norms", "norms of samples over the ranks", "complete_norms_summed", "norms.replicated-complete"),
    Planted("mixed_precision", "precision", "factors_rounded_to_half_precision", "precision.factors"),
    Planted("clipping", "the clipping of the gradient", "clipped_unit_by_unit", "global-norm.update"),
    Planted("sharding", "the reduction", "averaged_twice", "rounding.gradients"),
    Planted("noise", "noise", "biases_have_a_tenth_of_the_noise", "noise.scale"),
    Planted("padding", "the update, and padding", "padding_cleared_before_the_update", "padding.zero"),
    Planted("state", "the checkpoint", "first_writer_alone_is_read", "state.resharded"),
)
"""In the order of a step."""


@dataclass(frozen=True)
class Printed:
    """What one session has printed, without the folder of its checkout, and how it ended."""

    code: int
    text: str


def command(planted: Planted) -> tuple[str, ...]:
    """The words behind ``fsdpcheck``, the same at both commits."""
    install = f"fsdpcheck.impl.faults:{planted.fault}"
    asked = ("--adapter", "reference", "--install", install, "--law", planted.law)
    return ("run", *asked, "--profile", "quick", "--no-confirm")


def session(planted: Planted, checkout: Path) -> Printed:
    """A session of this checkout's fsdpcheck. Raises RuntimeError if it ends with an error of use or of fsdpcheck."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FSDPCHECK")},
        **{"PYTHONPATH": str(checkout), "COLUMNS": "120", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
    }
    words = (sys.executable, "-m", "fsdpcheck", *command(planted))
    ran = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode not in (0, 1):
        raise RuntimeError(f"{planted.fault} at {checkout}: exit code {ran.returncode}: {ran.stderr[-2000:]}")
    return Printed(ran.returncode, _without(checkout, ran.stdout))


def _without(checkout: Path, text: str) -> str:
    lines = [line.rstrip() for line in text.replace(f"{checkout}/", "").splitlines()]
    return re.sub(r"\A\n+|\n+\Z", "", "\n".join(lines))


def lines(checkout: str, glob: str = "*") -> Iterator[str]:
    """For each of the ten, its command and what is printed at both commits, as Markdown."""
    earlier = Path(checkout).resolve()
    for number, planted in enumerate(TEN, 1):
        if fnmatch(planted.fault, glob):
            yield f"## {number}. {planted.part[0].upper()}{planted.part[1:]}: `{planted.fault}`\n"
            yield f"`fsdpcheck {' '.join(command(planted))}`\n"
            for side, where in (("Before", earlier), ("After", HERE)):
                yield f"{side}:\n\n```text\n{session(planted, where).text}\n```\n"
