"""``assert_ranks_agree``: ``fsdpcheck compare`` as an assertion of a user's own test."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpcheck.comparison.results import Comparison


class RanksDisagree(AssertionError):
    """A script computes other things on more ranks, or nothing could be decided; ``comparison`` has it as data."""

    def __init__(self, text: str, comparison: Comparison) -> None:
        super().__init__(text)
        self.comparison = comparison


def assert_ranks_agree(
    script: str,
    arguments: str | Sequence[str] = (),
    ranks: Sequence[int] = (1, 2, 4),
    *,
    cuda_as_cpu: bool = False,
    per_node: int = 0,
    own: Sequence[str] = (),
    seed: int | None = None,
    false_alarm: float | None = None,
    jobs: int = 1,
) -> Comparison:
    """Assert that a training script computes on each of ``ranks`` what it computes on the first.

    ``script``: its path, or "-m module". ``arguments``: words, or one string of them, in which braces hold arithmetic
    over W: ``["--batch-size", "{16//W}"]``. The others as in ``fsdpcheck compare --help``. The script runs in processes
    of its own, with a folder of its own that has links to all that the working folder has.

    Returns what was compared. Raises RanksDisagree, with the report of ``fsdpcheck compare``, where ranks differ, fail,
    or where nothing could be decided, and UsageError for a command line or ranks that are none.
    Guarantee: that of ``fsdpcheck.comparison.compare.compare``.
    """
    from fsdpcheck.comparison.command_line import read
    from fsdpcheck.comparison.compare import compare
    from fsdpcheck.comparison.kept_runs import Runs
    from fsdpcheck.comparison.rounding_bound import FALSE_ALARM
    from fsdpcheck.comparison.runs import Draws
    from fsdpcheck.report import comparison as report
    from fsdpcheck.simulation.simulate import Options

    __tracebackhide__ = True
    words = arguments if isinstance(arguments, str) else " ".join(_quoted(word) for word in arguments)
    wanted = Options(per_node=per_node, show=False, cuda_as_cpu=cuda_as_cpu, own=tuple(own))
    line, alarm = read(f"{script} {words}"), FALSE_ALARM if false_alarm is None else false_alarm
    runs = Runs(line, wanted, next(iter(ranks), 1), jobs, draws=Draws(seed=seed))
    found = compare(line, ranks, wanted, false_alarm=alarm, runs=runs)
    if found.says != "agrees":
        raise RanksDisagree(report.ending(found, lambda text, colour: text), found)
    return found


def _quoted(word: str) -> str:
    """A word for a shell, with its braces as they are."""
    return word if word.startswith("{") and word.endswith("}") else shlex.quote(word)
