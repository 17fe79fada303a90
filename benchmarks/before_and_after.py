"""Ten planted mistakes of ten roots: what ``fsdpcheck run`` prints of each at an earlier commit, and here.

``python -m benchmarks before-after PYTHON [GLOB]``. PYTHON is the interpreter of an environment into which a worktree
of EARLIER was installed editable (``pip install -e``); the interpreter at hand runs this commit. The ten follow from a
rule, and were committed before anything was printed: of ten modules of ``impl/faults``, one for each part of a step,
the first fault by name that both commits plant in the reference alike, and whose law is written out and that of no
module before. Where ten cases find nothing, sixty are judged as well.
"""

from __future__ import annotations

import os
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


def command(planted: Planted, profile: str = "quick") -> tuple[str, ...]:
    """The words behind ``fsdpcheck``, the same at both commits."""
    install = f"fsdpcheck.impl.faults:{planted.fault}"
    asked = ("--adapter", "reference", "--install", install, "--law", planted.law)
    return ("run", *asked, "--profile", profile, "--no-confirm")


def session(planted: Planted, python: str, checkout: Path, profile: str) -> Printed:
    """A session of the fsdpcheck that this interpreter imports. Raises RuntimeError if it ends with an error."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **{"COLUMNS": "120", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
    }
    words = (python, "-m", "fsdpcheck", *command(planted, profile))
    ran = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode not in (0, 1):
        raise RuntimeError(f"{planted.fault} at {checkout}: exit code {ran.returncode}: {ran.stdout[-2000:]}")
    return Printed(ran.returncode, without(checkout, ran.stdout))


def without(checkout: Path, text: str) -> str:
    """The lines of a report, with the paths of the checkout relative to it."""
    lines = [line.rstrip() for line in text.replace(f"{checkout}/", "").splitlines()]
    return "\n".join(lines).strip("\n")


def checkout_of(python: str) -> Path:
    """Where the fsdpcheck that this interpreter imports lies. RuntimeError: no checkout of EARLIER."""
    asked = (python, "-c", "import fsdpcheck; print(fsdpcheck.__file__)")
    ran = subprocess.run(asked, cwd="/", capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{python} imports no fsdpcheck; next: pip install -e a worktree of {EARLIER}")
    where = Path(ran.stdout.strip()).parents[1]
    head = ("git", "-C", str(where), "rev-parse", "HEAD")
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout
    if not commit.startswith(EARLIER):
        raise RuntimeError(f"{python} imports {where}, got commit {commit[:8] or 'none'}, wanted {EARLIER}")
    return where


def lines(python: str, glob: str = "*") -> Iterator[str]:
    """For each of the ten, its command and what is printed at both commits, as Markdown."""
    sides = (("Before", python, checkout_of(python)), ("After", sys.executable, HERE))
    for number, planted in enumerate(TEN, 1):
        if fnmatch(planted.fault, glob):
            yield f"## {number}. {planted.part[0].upper()}{planted.part[1:]}: `{planted.fault}`\n"
            yield _block(f"fsdpcheck {' '.join(command(planted))}")
            for side, interpreter, checkout in sides:
                yield from _side(planted, side, interpreter, checkout)


def _side(planted: Planted, side: str, python: str, checkout: Path) -> Iterator[str]:
    printed = session(planted, python, checkout, "quick")
    yield f"{side}:\n\n{_block(printed.text)}"
    if not printed.code:
        yield f"{side}, with `--profile ci`:\n\n{_block(session(planted, python, checkout, 'ci').text)}"


def _block(text: str) -> str:
    return f"```text\n{text}\n```\n"
