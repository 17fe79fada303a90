"""What each judge's words are worth, counted alike for all: fsdpcheck, torch's tools, and analysers of dumps.

A peer's text names a kind by the words that torch has for it, the ranks that these words accuse and that raised, and
the lines of the program in tracebacks. Whoever raises by itself on the correct twin cannot run the pair.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.communication.judged import Verdict, ranks_in
from benchmarks.communication.pairs import Pair
from benchmarks.communication.real import Outcome

Result = Literal["said", "time-out", "other result", "nothing", "not applicable"]

RESULTS: Final[dict[Result, str]] = {
    "said": "the tool raised, ended or reported something, right or wrong",
    "time-out": "the clock of the group or of the benchmark ended it, and nobody said what is wrong",
    "other result": "the program came to its end with other values than its twin, and no tool said so",
    "nothing": "the program came to its end with the values of its twin",
    "not applicable": "the tool cannot run the correct twin",
}
"""What came of a faulty program -> what it says."""

_NOT_ALL_CAME: Final = (
    r"failed to pass monitoredBarrier|successfully reached monitoredBarrier, but received errors",
    r"Not all ranks joining collective|a call was never matched",
)
"""Says who is missing, and not whether it will still come: counted as a deadlock and as unsafe, whoever says it."""
_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "mismatch": (
        r"Detected mismatch between collectives",
        r"Is there a distributed collective mismatch in your code",
        r"expects same model across all ranks",
        r"COLLECTIVE_TYPE_MISMATCH|SIZE_OR_SYNTAX_MISMATCH|COLLECTIVE_DTYPE_MISMATCH",
        r"Input/output mismatch in the collective|mismatch in desc|mismatch in membership",
        r"must match the size of tensor|doesn't match the broadcast shape|stack expects each tensor to be equal size",
    ),
    "deadlock": _NOT_ALL_CAME,
    "unsafe": _NOT_ALL_CAME,
    "lost": (r"ended: (signal|exit code)", r"Connection (closed|reset) by peer", r"Missing dump files from ranks"),
    "exited": (r"ended: (signal|exit code|SystemExit)", r"Connection (closed|reset) by peer"),
}
"""Kind of verdict -> the words of torch, gloo and torchfrtrace that name it."""
_CLOCK: Final = r"Timed out waiting|imeout after|timed out after|Application timeout"
_OF_ANOTHER: Final = r"Test termination event occurs|" + _CLOCK
"""What a rank raises because another did, or because time is over."""
_RANKS: Final = (
    r"(?m)^rank (\d+): (?!ended: SystemExit\('Test termination)",
    r"[Rr]anks? \[?([\d, ]+)\]? (?:failed to pass|not at their end)",
    r"[Rr]ank (\d+) is running collective",
    r"errors while waiting for send/recv from rank (\d+)",
    r"missing ranks: \{([\d, ]+)\}|Culprit rank (\d+)|Missing dump files from ranks \{([\d, ]+)\}",
)
_OWN_KINDS: Final = re.compile(r"(deadlock|unsafe|mismatch): ")
"""How a report of ``fsdpcheck trace check`` begins."""


@dataclass(frozen=True)
class Score:
    """What a judge said of a pair.

    ``strict``: kind, line and ranks of the faulty program are right, and nothing is said of the twin. ``placed``: line
    and ranks are right, whatever the kind. ``alarm``: the twin is accused. ``seconds``: of both programs.
    """

    strict: bool
    placed: bool
    result: Result
    alarm: bool
    seconds: float


def kinds_in(text: str) -> frozenset[str]:
    """The kinds that a text names: that of fsdpcheck's report, and those of the words that all are measured by."""
    named = {kind for kind, words in _WORDS.items() if any(re.search(word, text) for word in words)}
    if own := _OWN_KINDS.match(text):
        return frozenset(named | {own[1]})
    pieces = re.split(r"(?m)^(?=(?:rank \d+|all ranks): )", text)
    raised = [piece for piece in pieces if re.match(r"(rank \d+|all ranks): raised: ", piece)]
    by_itself = [
        piece
        for piece in raised
        if not re.search(_OF_ANOTHER, piece) and not re.search("|".join(_WORDS["lost"]), piece)
    ]
    return frozenset(named | ({"raised"} if by_itself else set()))


def accused_in(text: str) -> frozenset[int]:
    """The ranks that a text names as at fault, or as the ones that raised."""
    if _OWN_KINDS.match(text):
        return frozenset(ranks_in(text))
    found = [number for pattern in _RANKS for hit in re.finditer(pattern, text) for number in hit.groups() if number]
    return frozenset(int(rank) for part in found for rank in re.findall(r"\d+", part))


def score(pair: Pair, found: Outcome, twin: Outcome) -> Score:
    """What a peer said of a pair."""
    alarm = _is_alarm(twin)
    seconds = found.seconds + twin.seconds
    if twin.kind != "completed" and not alarm:
        return Score(strict=False, placed=False, result="not applicable", alarm=False, seconds=seconds)
    result = _result(found, twin)
    if result not in ("said", "time-out"):
        return Score(strict=False, placed=False, result=result, alarm=alarm, seconds=seconds)
    ranks, lines = accused_in(found.text), pair.lines_in(found.text)
    strict = pair.is_named_by(kinds_in(found.text), ranks, lines) and not alarm
    return Score(strict, pair.is_placed_by(ranks, lines), result, alarm, seconds)


def _result(found: Outcome, twin: Outcome) -> Result:
    if found.kind == "completed":
        return "nothing" if found.text == twin.text or twin.kind != "completed" else "other result"
    return "time-out" if found.kind == "time-out" and not _accuses(found.text) else "said"


def _is_alarm(twin: Outcome) -> bool:
    """Whether something accuses the correct twin: a report, the clock, or words that name a bug of communication."""
    return twin.kind in ("time-out", "reported") or (twin.kind != "completed" and _accuses(twin.text))


def _accuses(text: str) -> bool:
    return bool(kinds_in(text) & {"mismatch", "deadlock"})


def own_score(pair: Pair, found: Verdict, twin: Verdict) -> Score:
    """What fsdpcheck said of a pair."""
    placed = bool(found.kind) and pair.is_placed_by(found.ranks, found.lines)
    seconds = found.seconds + twin.seconds
    return Score(
        found.is_right(pair) and not twin.kind, placed, "said" if found.kind else "nothing", bool(twin.kind), seconds
    )
