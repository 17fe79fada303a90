"""All mechanisms by name: ``--install tests.mechanisms.planted:NAME`` plants one.

``python -m tests.mechanisms.planted`` prints the table.
"""

from __future__ import annotations

from typing import Any

from tests.mechanisms import averaging, clipping, lifecycle, noise_and_samplers, sharding, state
from tests.mechanisms.planting import Mechanism

COLLECTIONS = [module.found for module in (averaging, clipping, noise_and_samplers, sharding, state, lifecycle)]
ALL: dict[str, Mechanism] = {name: m for collection in COLLECTIONS for name, m in collection.mechanisms.items()}


def __getattr__(name: str) -> Any:
    if name in ALL:
        return ALL[name]
    raise AttributeError(f"there is no mechanism {name!r}, there are {', '.join(ALL)}")


def table() -> str:
    """The set in Markdown, a table a subject."""
    lines: list[str] = []
    for collection in COLLECTIONS:
        subject = collection.subject[0].upper() + collection.subject[1:]
        lines += [f"### {subject} ({len(collection.mechanisms)})", ""]
        lines += ["| name | reported in | what goes wrong | first wrong | window | adapter |", "|" + " --- |" * 6]
        lines += [_row(mechanism) for mechanism in collection.mechanisms.values()]
        lines.append("")
    return "\n".join(lines)


def _row(mechanism: Mechanism) -> str:
    repository, kind, number = mechanism.source.removeprefix("https://github.com/").rsplit("/", 2)
    assert kind in ("issues", "pull"), mechanism.source
    source = f"[{repository}#{number}]({mechanism.source})" + ("" if mechanism.stated else " (deduced)")
    shown = "" if mechanism.shown else f" **Not shown**: {mechanism.why}."
    window = ", ".join(f"{change.file} {change.function}" for change in mechanism.changes)
    cells = [f"`{mechanism.name}`", source, mechanism.what + shown, mechanism.quantity, window]
    return f"| {' | '.join([*cells, mechanism.adapter or 'none'])} |"


if __name__ == "__main__":
    print(table())
