"""Lines and branches of an implementation's functions that cases reached, by file and by law, as coverage.py has them.

Files that no process has imported are not counted.
"""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coverage import Coverage, CoverageData
from coverage.exceptions import NoDataError

from fsdpcheck.report.colour import Paint
from fsdpcheck.report.table import aligned

_WIDTH: Final = 120
_INDENT: Final = 22
Arc = tuple[int, int]


@dataclass(frozen=True)
class Reached:
    """Of one file: lines and branches that ran, and those that did not. A branch is (from line, to line); a negative
    end leaves the function."""

    file: str
    ran: frozenset[int]
    missed: frozenset[int]
    taken: frozenset[Arc]
    untaken: frozenset[Arc]


@dataclass(frozen=True)
class Session:
    """``laws``: law -> (file, line) and (file, branch) that its cases reached."""

    files: tuple[Reached, ...]
    laws: dict[str, frozenset[tuple[str, int | Arc]]]


def combined(folder: Path, file: Path) -> Session:
    """What processes measured, put together in ``file``, which it replaces."""
    file.unlink(missing_ok=True)
    whole = Coverage(data_file=str(file), branch=True, config_file=False, messages=False)
    try:
        whole.combine([str(part) for part in folder.iterdir()], keep=True)
    except NoDataError:
        return Session((), {})
    whole.save()
    with tempfile.TemporaryDirectory() as scratch:
        told = Path(scratch) / "coverage.json"
        try:
            whole.json_report(outfile=str(told), ignore_errors=True)
        except NoDataError:
            return Session((), {})
        files = json.loads(told.read_text(encoding="utf-8"))["files"]
    found = tuple(_reached(name, data) for name, data in sorted(files.items()))
    return Session(found, _by_law(whole.get_data(), found))


def _reached(name: str, data: dict[str, Any]) -> Reached:
    """What functions ran of a file; the bodies of modules and classes run whenever it is imported."""
    functions = [one for function, one in data["functions"].items() if function]

    def all_of(key: str) -> Iterator[Any]:
        return (at for one in functions for at in one[key])

    taken, untaken = (frozenset(map(tuple, all_of(key))) for key in ("executed_branches", "missing_branches"))
    return Reached(name, frozenset(all_of("executed_lines")), frozenset(all_of("missing_lines")), taken, untaken)


def _by_law(data: CoverageData, files: Iterable[Reached]) -> dict[str, frozenset[tuple[str, int | Arc]]]:
    known = {str(Path(one.file).resolve()): one for one in files}
    return {law: frozenset(_run_by(data, law, known)) for law in sorted(data.measured_contexts() - {""})}


def _run_by(data: CoverageData, law: str, known: Mapping[str, Reached]) -> set[tuple[str, int | Arc]]:
    data.set_query_context(law)
    found: set[tuple[str, int | Arc]] = set()
    for path in data.measured_files():
        one = known.get(str(Path(path).resolve()))
        if one is not None:
            found |= {(one.file, line) for line in data.lines(path) or () if line in one.ran}
            found |= {(one.file, arc) for arc in data.arcs(path) or () if arc in one.taken}
    return found


def text(session: Session, file: Path, paint: Paint) -> str:
    """What ran of each file and what did not, what each law alone reached, and a line that sums it up."""
    files = [one for one in session.files if one.ran | one.missed]
    if not files:
        return f"coverage: nothing of an implementation ran that could be measured; {file} holds nothing"
    rows = [(_of(one.ran, one.missed), _of(one.taken, one.untaken), _named(one.file)) for one in files]
    below = [", ".join(_not_reached(one)) for one in files]
    parts = [_listed(("lines", "branches", "file, and below it what no case reached"), rows, below, paint)]
    if len(session.laws) > 1:
        rows, below = list(_law_rows(session)), list(_alone(session))
        parts.append(_listed(("lines", "branches", "law, and below it what no other law reached"), rows, below, paint))
    lines = _share((one.ran, one.missed) for one in files)
    branches = _share((one.taken, one.untaken) for one in files)
    said = f"coverage: {lines} of lines and {branches} of branches ran, of {len(files)} files"
    return "\n\n".join([*parts, f"{said}; next: coverage html --data-file {file}"])


def _of(had: Collection[object], missed: Collection[object]) -> str:
    return f"{len(had)}/{len(had) + len(missed)}"


def _share(counted: Iterable[tuple[Collection[object], Collection[object]]]) -> str:
    found = [(len(had), len(missed)) for had, missed in counted]
    had, missed = (sum(numbers) for numbers in zip(*found, strict=True))
    return f"{100 * had / (had + missed):.1f} %" if had + missed else "none"


def _listed(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], below: Sequence[str], paint: Paint) -> str:
    """Rows in columns, each with what stands below it."""
    first, *table = aligned([head, *rows], paint, right={0, 1}).splitlines()
    indent = " " * _INDENT
    told = [textwrap.fill(one, _WIDTH, initial_indent=indent, subsequent_indent=indent) for one in below]
    return "\n".join([first, *(f"{row}\n{more}" if more else row for row, more in zip(table, told, strict=True))])


def _not_reached(one: Reached) -> Iterator[str]:
    """Lines, and branches between lines that both ran."""
    yield from _ranges(one.missed)
    yield from (f"{first}->{_end(last)}" for first, last in sorted(one.untaken) if not {first, last} & one.missed)


def _law_rows(session: Session) -> Iterator[tuple[str, str, str]]:
    for law, own in session.laws.items():
        lines = sum(isinstance(at, int) for _, at in own)
        yield str(lines), str(len(own) - lines), law


def _alone(session: Session) -> Iterator[str]:
    """Of each law what no other law reached: lines, and lines where a branch begins."""
    seen = Counter(at for own in session.laws.values() for at in own)
    for own in session.laws.values():
        alone: dict[str, set[int]] = {}
        for file, at in (at for at in own if seen[at] == 1):
            alone.setdefault(file, set()).add(at if isinstance(at, int) else at[0])
        yield "; ".join(f"{_named(file)}:{', '.join(_ranges(lines))}" for file, lines in sorted(alone.items()))


def _named(file: str) -> str:
    """Below the folder that a reader knows: torch's by its name there, others as coverage.py names them."""
    return file[file.index("torch/distributed") :] if "torch/distributed" in file else file


def _end(line: int) -> str:
    return "exit" if line < 0 else str(line)


def _ranges(numbers: Iterable[int]) -> Iterator[str]:
    """Numbers in ascending order, those in a row as "first-last"."""
    ordered = sorted(numbers)
    for place, number in enumerate(ordered):
        if place == 0 or ordered[place - 1] != number - 1:
            first = number
        if place + 1 == len(ordered) or ordered[place + 1] != number + 1:
            yield str(first) if first == number else f"{first}-{number}"
