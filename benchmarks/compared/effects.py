"""What a planted bug does: its run on simulated ranks beside that of the honest script on as many.

On an equal number of ranks the pieces of both runs lie alike, so that gradients and parameters of each rank are
compared piece by piece, in float64, at every step of every optimizer. This says that a bug has an effect, and how large
it is; whether the script then differs from itself on one rank is for the comparison to say.

``python -m benchmarks.compared.effects honest [GLOB]``: what each honest script prints in float64, by number of ranks.
``python -m benchmarks.compared.effects bugs [GLOB [N]]``: what each bug changes, on N numbers of ranks (3).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchmarks.compared.honest import HONEST, Honest
from fsdpcheck.simulation.current_rank import current_rank
from fsdpcheck.simulation.programs import script
from fsdpcheck.simulation.simulate import Options, simulate_script

Piece = np.ndarray[Any, np.dtype[np.float64]]
_SECONDS: Final = 240
"""Processor time after which a rank is given up."""


@dataclass
class Run:
    """What came of one run: its failure ("" for none), what ranks printed, and pieces by rank, step and kind."""

    failure: str = ""
    printed: str = ""
    gradients: dict[int, list[list[Piece]]] = field(default_factory=dict)
    parameters: dict[int, list[list[Piece]]] = field(default_factory=dict)

    def losses(self) -> list[str]:
        """The lines with numbers that ranks printed."""
        return [line for line in self.printed.splitlines() if any(sign.isdigit() for sign in line)]


def in_float64(text: str) -> str:
    """The script with the types that it names replaced by float64: for a look at it without rounding.

    Raises ValueError for a script without one function ``main()``.
    """
    for old in ("bfloat16", "float16", "float32"):
        text = text.replace(f"torch.{old}", "torch.float64")
    text = text.replace(".float()", ".double()")
    if text.count("def main():\n") != 1:
        raise ValueError("wanted a script with one function main() without arguments")
    return text.replace("def main():\n", "def main():\n    torch.set_default_dtype(torch.float64)\n")


def run(text: str, name: str, arguments: list[str], world_size: int) -> Run:
    """Run a script in a process of its own, on simulated ranks."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(sending, text, name, arguments, world_size)
    )
    process.start()
    sending.close()
    try:
        result: Run = receiving.recv()
    except EOFError:
        result = Run(failure="the process ended without a result")
    process.join()
    return result


def _child(sending: Any, text: str, name: str, arguments: list[str], world_size: int) -> None:
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            path = Path(folder) / f"{name}.py"
            path.write_text(text, encoding="utf-8")
            result = _observed(path, arguments, world_size)
    except BaseException:
        result = Run(failure=traceback.format_exc())
    sending.send(result)


def _observed(path: Path, arguments: list[str], world_size: int) -> Run:
    made, seen = script.of_file(path, arguments), Run()
    plain = made.run

    def watched() -> None:
        register_optimizer_step_pre_hook(lambda optimizer, *_: _keep(seen.gradients, optimizer, of_gradient=True))
        register_optimizer_step_post_hook(lambda optimizer, *_: _keep(seen.parameters, optimizer, of_gradient=False))
        plain()

    object.__setattr__(made, "run", watched)
    done = simulate_script(made, world_size, Options(show=False, budget=_SECONDS))
    seen.failure = "" if done.failure is None else done.failure.text
    seen.printed = "".join(done.printed)
    return seen


def _keep(into: dict[int, list[list[Piece]]], optimizer: torch.optim.Optimizer, *, of_gradient: bool) -> None:
    rank = current_rank()
    assert rank is not None
    pieces = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensor = parameter.grad if of_gradient else parameter
            local = getattr(tensor, "_local_tensor", tensor)
            pieces.append(np.zeros(0) if local is None else local.detach().double().numpy().copy())
    into.setdefault(rank, []).append(pieces)


def distance(honest: dict[int, list[list[Piece]]], other: dict[int, list[list[Piece]]]) -> tuple[int, float]:
    """The first step at which any piece differs in a bit (-1: none does), and the largest relative distance of a rank.

    Relative to the largest entry of all pieces of that rank and step; infinite where pieces are missing or of another
    shape.
    """
    first, largest = -1, 0.0
    for rank in sorted(honest.keys() | other.keys()):
        left, right = honest.get(rank, []), other.get(rank, [])
        for step in range(max(len(left), len(right))):
            far = _far(left[step], right[step]) if step < min(len(left), len(right)) else float("inf")
            if far > 0 and (first < 0 or step < first):
                first = step
            largest = max(largest, far)
    return first, largest


def _far(left: list[Piece], right: list[Piece]) -> float:
    if [piece.shape for piece in left] != [piece.shape for piece in right]:
        return float("inf")
    scale = max((float(np.abs(piece).max()) for piece in left if piece.size), default=0.0)
    far = max((float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True) if a.size), default=0.0)
    return float("inf") if far != far else far / scale if scale else far


def _honest_lines(script_: Honest) -> None:
    told = {
        ranks: run(in_float64(script_.path.read_text()), script_.name, script_.arguments(ranks, quiet=True), ranks)
        for ranks in script_.ranks
    }
    for ranks, seen in told.items():
        print(f"{script_.name} W={ranks} {seen.failure}", *seen.losses(), sep="\n  ", flush=True)


def _bug_lines(pattern: str, numbers: int) -> None:
    from benchmarks.compared.bugs import BUGS

    kept: dict[tuple[str, int], Run] = {}
    for bug in BUGS:
        if not fnmatch(bug.name, pattern) and not fnmatch(bug.script, pattern):
            continue
        print(f"{bug.name} ({bug.script}; {bug.cause}; {bug.first}; {bug.ranks})")
        ranks_shown = bug.ranks or bug.honest.ranks[1:]
        for ranks in dict.fromkeys((ranks_shown[0], bug.honest.ranks[0], ranks_shown[-1])[:numbers]):
            arguments = bug.honest.arguments(ranks, quiet=True)
            if (bug.script, ranks) not in kept:
                kept[bug.script, ranks] = run(bug.honest.path.read_text(), bug.script, arguments, ranks)
            seen, honest = run(bug.text(), bug.script, arguments, ranks), kept[bug.script, ranks]
            gradients, parameters = (
                distance(honest.gradients, seen.gradients),
                distance(honest.parameters, seen.parameters),
            )
            last = (seen.losses() or [""])[-1]
            print(
                f"  W={ranks} gradients step {gradients[0]} {gradients[1]:.1e}, parameters step {parameters[0]} "
                f"{parameters[1]:.1e}, printed {'same' if seen.losses() == honest.losses() else 'other'}: {last}"
                + (f"\n    FAILED {seen.failure[:700]}" if seen.failure else ""),
                flush=True,
            )


if __name__ == "__main__":
    what, wanted = sys.argv[1], (*sys.argv[2:], "*")[0]
    if what == "bugs":
        _bug_lines(wanted, int((*sys.argv[3:], 3)[0]))
    else:
        for each in HONEST:
            if fnmatch(each.name, wanted):
                _honest_lines(each)
