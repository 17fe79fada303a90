"""The tables of docs/compare.md, from the rows of results.jsonl."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """All of them, in Markdown, with a blank line between two."""
    of_kind: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of_kind[row["name"].partition("/")[0]].append(row)
    yield from head([row for each in of_kind.values() for row in each])
    yield ""
    yield from honest([*of_kind["honest"], *of_kind["harmless"]])
    yield ""
    yield from bugs(of_kind["bug"])
    yield ""
    yield from small_errors(of_kind["bug"])
    yield ""
    yield from public(of_kind["public"])


def head(rows: list[Row]) -> Iterator[str]:
    """How many rows, of which commits, and what they took."""
    commits = ", ".join(sorted({row.get("commit", "unknown") for row in rows}))
    seconds = sum(row["seconds"] for row in rows)
    yield f"{len(rows)} scripts at {commits}, {seconds / len(rows):.0f} s of processor time each."


def honest(rows: list[Row]) -> Iterator[str]:
    """By number of ranks, what is said of scripts that train alike, and what ``torch.allclose`` says of them."""
    yield "| ranks | comparisons | agree | differ | undecidable | resolution (least, median, most) | allclose: differ |"
    yield "|---|---|---|---|---|---|---|"
    sizes = sorted({world["ranks"] for row in rows for world in row["worlds"]})
    for size in sizes:
        pairs = [(row, world) for row in rows for world in row["worlds"] if world["ranks"] == size]
        said = [world["says"] for _, world in pairs]
        fine = [world["resolution"] for _, world in pairs if world["says"] == "agrees" and world["resolution"]]
        accused = sum(row["allclose"].get(str(size), 0) > 0 for row, _ in pairs)
        shown = f"{min(fine):.0e}, {statistics.median(fine):.0e}, {max(fine):.0e}" if fine else "equal bits"
        counts = [said.count(word) for word in ("agrees", "differs", "undecidable")]
        yield f"| {size} | {len(pairs)} | {' | '.join(map(str, counts))} | {shown} | {accused} |"


def bugs(rows: list[Row]) -> Iterator[str]:
    """By planted cause: how many, found, and named as planted."""
    from benchmarks.compared.study import is_named, is_right

    yield "| planted | bugs | found | cause named | not found | allclose: differ |"
    yield "|---|---|---|---|---|---|"
    causes = sorted({row["cause"] for row in rows})
    total = [0, 0, 0, 0]
    for cause in causes:
        mine = [row for row in rows if row["cause"] == cause]
        found = [row for row in mine if is_right(row)]
        named = [row for row in found if any(is_named(cause, world) for world in row["worlds"])]
        lost = ", ".join(_name(row) for row in mine if row not in found)
        near = [row for row in mine if any(row["allclose"].values())]
        total = [sum(pair) for pair in zip(total, map(len, (mine, found, named, near)), strict=True)]
        yield f"| {cause} | {len(mine)} | {len(found)} | {len(named)} | {lost} | {len(near)} |"
    yield f"| all | {total[0]} | {total[1]} | {total[2]} | | {total[3]} |"


def small_errors(rows: list[Row]) -> Iterator[str]:
    """Relative errors planted in one rank's part of a gradient: which are found."""
    yield "| script | relative error | found |"
    yield "|---|---|---|"
    for row in sorted((row for row in rows if row["cause"] == "small error"), key=_name):
        script, _, size = _name(row).rpartition("_error_")
        yield f"| {script} | {size} | {'yes' if row['says'] == 'differs' else 'no'} |"


def public(rows: list[Row]) -> Iterator[str]:
    """Bugs that were reported in public: what is said of the faulty and of the correct program."""
    yield "| program | faulty | named | seconds | correct |"
    yield "|---|---|---|---|---|"
    forms = {row["name"]: row for row in rows}
    for name in sorted({_name(row) for row in rows}):
        faulty, correct = (forms.get(f"public/{name}/{form}") for form in ("faulty", "correct"))
        named = next((world["named"] for world in faulty["worlds"] if world["named"]), "") if faulty else ""
        said = [row["says"] if row else "" for row in (faulty, correct)]
        yield f"| {name} | {said[0]} | {named} | {faulty['seconds'] if faulty else ''} | {said[1]} |"


def _name(row: Row) -> str:
    return str(row["name"].split("/")[1])
