"""Scores of mechanisms (benchmarks/mechanisms.py): what was printed of each, beside what was written down beforehand.

Of each finding, read by script alone from a row of the record:

- *quantity*: the first wrong quantity that is printed (``stage``; of a run that failed, how) is the expected one
  ("right"), another, or none is printed.
- *window*: a printed line (``place``, ``stage``, ``lines``; no further frames of a traceback) is one of a function that
  the mechanism alters ("inside"), none is ("outside"), or no line is printed ("absent"). How many functions are printed
  is counted beside it: of a window that holds them all nothing would follow.
- *cause*: "absent" without one. Else which quantities it names is read off by ``NAMED``; of one that names none, such
  as "it is 4 times the right one", the finding's "what" is read before it. It is "WRONG" if it contradicts the expected
  one: if every quantity that it names is one that a step has *before* the expected one, and so is right; or if it has
  none of the mechanism's own words, which are those of its sentence, of its name, and of its window. Else it is
  "right". Words are compared by their first five letters, and those of ``_OF_ANY`` tell nothing. So what is right in
  words is an upper bound: that a cause speaks of the right thing is seen, and not that all of it is true.

Goals: found >= 95 %, window or cause right >= 85 % of those found, causes that are wrong 0.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

from tests.mechanisms.planted import ALL
from tests.mechanisms.planting import Mechanism, Quantity

GOALS: Final = {"found": 0.95, "window or cause right": 0.85}
ORDER: Final[tuple[str, ...]] = get_args(Quantity)
PRINTED: Final = {
    "a parameter as the forward reads it": ("output",),
    "the samples that arrive at the loss": ("input", "sample draw"),
    "the local gradient": ("gradient (local)",),
    "the norms": ("per-sample norm",),
    "the clip factors": ("clip factor",),
    "the global norm": ("global norm",),
    "the factor that clips all gradients": ("clip factor",),
    "the options of the optimizer": ("optimizer state",),
    "the reduced gradient": ("gradient (reduced)",),
    "the noise": ("noise",),
    "the parameters": ("parameter after step",),
    "the state that came back": ("optimizer state", "checkpoint"),
    "what a checkpoint holds": ("checkpoint",),
    "what the model gives": ("output",),
    "the records that are drawn": ("sample draw",),
    "memory": ("memory",),
}
"""Words of a printed first wrong quantity -> what it is among those that mechanisms are expected to have wrong."""
FAILED: Final = {
    "raised": "exception", "deadlock": "hang", "mismatch": "hang", "in-flight": "collective",
    "never waited for": "collective", "unsafe": "collective", "freed in use": "collective", "order": "collective",
}  # fmt: skip
"""Kinds of failures of a run -> the same."""
NAMED: Final = {
    "per-sample norm": r"\bnorms?\b|\bsquared? norms?\b",
    "global norm": r"\bglobal (gradient )?norm|\bnorm\b",
    "clip factor": r"\bclip|\bfactor",
    "gradient (local)": r"\bgradient|\bmicro-batch|\bsamples? of (the )?(rank|replica)",
    "gradient (reduced)": r"\bgradient|\bmicro-batch|\bsamples? of (the )?(rank|replica)|\bnot reduced",
    "noise": r"\bnoise|\bdraw\b",
    "parameter after step": r"\bparameter|\bfrozen|\bupdate",
    "optimizer state": r"\bstate\b|\boptimizer|\blearning rate|\bstep counter",
    "checkpoint": r"\bcheckpoint|\bcome back|\bcame back|\bsaved|\bload",
    "sample draw": r"\bepoch|\bshares?\b|\bentries|\brecords?\b|\bmicro-batch|\bshuffle",
    "collective": r"\bcollective|\bwait",
    "hang": r"\bcollectives? depend|\bcalls? \w+ of|\bhang|\bblock",
    "exception": r"\brais|\bexception",
    "memory": r"\bmemory|\bfreed|\bgathered",
    "output": r"\boutput|\bforward|\bbuffer",
}
"""Quantities -> what names one in a cause."""
_TOLD: Final = r"^the first to differ(?:, in step \d+)?(?: \(with .*? in use\)|, as the law compares it)?: (.*)"
_OF_ANY: Final = frozenset(
    {
        *(
            "the",
            "and",
            "or",
            "that",
            "what",
            "which",
            "who",
            "its",
            "all",
            "for",
            "from",
            "with",
            "has",
            "have",
            "had",
        ),
        *("are", "was", "not", "does", "did", "been", "one", "each", "other", "others", "than", "then", "only"),
        *("where", "right", "wrong", "same", "this", "but", "impl", "init", "get", "gets", "got"),
    }
)


def printed_quantities(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What the first wrong quantity that is printed is among those that are expected; () where none is printed."""
    finding = row["finding"]
    if finding["kind"] in FAILED:
        return (FAILED[finding["kind"]],)
    told = re.search(_TOLD, finding["stage"])
    if told is None:
        return ()
    return next((found for words, found in PRINTED.items() if told[1].startswith(words)), ("?",))


def quantity(row: Mapping[str, Any]) -> str:
    """ "right", "another" or "absent"."""
    found = printed_quantities(row)
    return "absent" if not found else "right" if ALL[row["mechanism"]].quantity in found else "another"


def printed_lines(row: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(file, line) of all that the finding names, in the order in which they are printed, each once."""
    finding = row["finding"]
    said = " ".join(finding.get(name, "") for name in ("place", "stage", "lines"))
    found: dict[tuple[str, int], None] = {}
    for file, numbers in re.findall(r"(\S+\.py):(\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", said):
        for part in numbers.split(", "):
            first, _, last = part.partition("-")
            found.update(dict.fromkeys((file, line) for line in range(int(first), int(last or first) + 1)))
    return [*found]


def window(row: Mapping[str, Any]) -> str:
    """ "inside", "outside" or "absent"."""
    named = printed_lines(row)
    return "absent" if not named else "inside" if inside(row) else "outside"


def inside(row: Mapping[str, Any]) -> bool:
    """Whether the finding names a line of a function that the mechanism alters."""
    named = printed_lines(row)
    for change in ALL[row["mechanism"]].changes:
        source, first = inspect.getsourcelines(change.target)
        if any(file.endswith(change.file) and first <= line < first + len(source) for file, line in named):
            return True
    return False


def cause(row: Mapping[str, Any]) -> str:
    """ "right", "absent" or "WRONG": see the module."""
    finding, mechanism = row["finding"], ALL[row["mechanism"]]
    said = finding["cause"]
    if not said:
        return "absent"
    if not _named(said):
        said = f"{finding['what']}: {said}"
    named, expected = _named(said), ORDER.index(mechanism.quantity)
    if named and all(ORDER.index(one) < expected for one in named):
        return "WRONG"
    return "right" if _words(said) & _own_words(mechanism) else "WRONG"


def _named(text: str) -> set[str]:
    return {name for name, pattern in NAMED.items() if re.search(pattern, text)}


def _words(text: str) -> set[str]:
    """Words that tell something, by their first five letters."""
    words = re.findall(r"[a-z]{3,}", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).replace("_", " ").lower())
    return {word[:5] for word in words if word not in _OF_ANY}


def _own_words(mechanism: Mechanism) -> set[str]:
    windows = " ".join(f"{change.module} {change.function}" for change in mechanism.changes)
    return _words(f"{mechanism.name} {mechanism.what} {windows}")


def score(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Counts and shares of all mechanisms that were run, by the last row of each, beside the goals."""
    rows = [*{row["mechanism"]: row for row in rows}.values()]
    if not rows:
        yield "0 mechanisms on record"
        return
    found = [row for row in rows if row["finding"] is not None]
    quick = sum(row["profile"] == "quick" for row in found)
    yield f"{len(rows)} mechanisms: {_share(len(found), len(rows))} found ({_goal('found')}), {quick} of them in quick"
    yield "survived: " + (", ".join(row["mechanism"] for row in rows if row["finding"] is None) or "-")
    if not found:
        return
    for name, judged in (("first wrong quantity", quantity), ("window", window), ("cause", cause)):
        counts = Counter(map(judged, found))
        yield f"{name}: " + ", ".join(f"{_share(count, len(found))} {said}" for said, count in sorted(counts.items()))
    either = [row for row in found if inside(row) or cause(row) == "right"]
    yield f"window or cause right: {_share(len(either), len(found))} ({_goal('window or cause right')})"
    wrong = [row["mechanism"] for row in found if cause(row) == "WRONG"]
    yield f"causes that are wrong: {len(wrong)} (goal 0){': ' * bool(wrong)}{', '.join(wrong)}"
    sizes = sorted(len(_functions(row)) for row in found if printed_lines(row))
    if sizes:
        yield f"functions that a window names: {sizes[len(sizes) // 2]} in the middle, {sizes[-1]} at most"
    neither = [row["mechanism"] for row in found if row not in either]
    yield f"neither: {', '.join(neither) or '-'}"


def _functions(row: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Of the lines that are printed, as far as their functions are printed beside them; else the lines."""
    finding = row["finding"]
    text = "\n".join(finding.get(name, "") for name in ("stage", "lines"))
    beside = {
        (file, int(line)): function for file, line, function in re.findall(r"(\S+\.py):(\d+)[^ ]* in (\w+)", text)
    }
    return {(file, beside.get((file, line), str(line))) for file, line in printed_lines(row)}


def _share(count: int, of: int) -> str:
    return f"{count} of {of} = {100 * count / of:.0f} %"


def _goal(name: str) -> str:
    return f"goal >= {100 * GOALS[name]:.0f} %"
