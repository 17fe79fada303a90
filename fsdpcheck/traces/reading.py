"""Files of traces, whoever wrote them: their content says what they are, and nothing in them is ever run."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from fsdpcheck.errors import UsageError, excerpt, explain, reading
from fsdpcheck.errors.reading import Unreadable
from fsdpcheck.execution.trace import Trace
from fsdpcheck.traces import chrome, dumps, entries, plain
from fsdpcheck.traces.job import Job, of_ranks

_OF_A_RANK: Final = re.compile(r"(\d+)(\.(json|pickle|pkl))?$")
_PICKLE: Final = b"\x80"
_WANTED: Final = "Flight-Recorder dumps (pickles or JSON), or what fsdpcheck simulate --trace or --json wrote"


def read(paths: Sequence[Path], one_by_one: Callable[[Sequence[Path]], Iterable[Path]] = iter) -> Job:
    """The job that folders of dumps, dumps, or one file of fsdpcheck tell of. Raises UsageError for anything else.

    ``one_by_one`` gives the files back in their order, and may show how far it is.
    """
    files = [file for path in paths for file in (_in_folder(path) if path.is_dir() else [path])]
    found: dict[int, tuple[Path, entries.Dump]] = {}
    for file in one_by_one(files):
        try:
            data = _content(file)
            if len(files) == 1 and isinstance(data, dict) and not data.keys().isdisjoint(_OF_ALL_RANKS):
                return next(read(data) for key, read in _OF_ALL_RANKS.items() if key in data)
            rank = _rank(file)
            if rank in found:
                raise Unreadable(f"it is a second dump of rank {rank}, beside {found[rank][0]}")
            found[rank] = file, entries.dump(rank, data)
        except Unreadable as error:
            _refuse(file, str(error))
    try:
        return dumps.job([dump for _, dump in found.values()])
    except Unreadable as error:
        _refuse(files[0].parent, str(error))


def _refuse(path: Path, why: str) -> NoReturn:
    then = "move it away, and its rank is one without a dump; or name other files"
    raise UsageError(explain(f"{path} cannot be read", got=why, wanted=_WANTED, where=path, then=then)) from None


def _in_folder(folder: Path) -> list[Path]:
    """The files of a folder that are dumps by their names."""
    there = sorted(file for file in folder.iterdir() if file.is_file())
    if not (found := [file for file in there if _OF_A_RANK.search(file.name)]):
        names = ", ".join(file.name for file in there[:5]) or "no file"
        wanted = "dumps whose names end in their ranks, as nccl_trace_rank_0 or rank_0.json"
        raise UsageError(explain("no dumps are in this folder", got=names, wanted=wanted, where=folder))
    return found


def _rank(file: Path) -> int:
    named = _OF_A_RANK.search(file.name)
    if named is None:
        raise Unreadable("no rank is at the end of its name, as in nccl_trace_rank_0 or rank_0.json")
    return int(named.group(1))


def _content(file: Path) -> Any:
    """The data in a file. Raises Unreadable."""
    content = reading.content(file)
    if content.startswith(_PICKLE):
        return _unpickled(content)
    try:
        return reading.json_data(content.decode())
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is neither a pickle nor UTF-8 (at byte {error.start})") from None


class _Unpickler(pickle.Unpickler):
    """Makes numbers, texts, lists, tuples and dicts: whatever names a class or a function is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise Unreadable(f"its pickle names {module}.{name}, and a dump names nothing: it was not run")


def _unpickled(content: bytes) -> Any:
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except Unreadable:
        raise
    except Exception as error:  # whatever unpickling raises over bytes that are no pickle
        raise Unreadable(f"its pickle is broken: {excerpt.kind(error)}: {excerpt.said(error)}"[:200]) from None


def _simulated(document: dict[str, Any]) -> Job:
    """The job of what ``fsdpcheck simulate --json`` wrote."""
    traces: dict[int, Trace] = {}
    times: dict[int, list[tuple[int, ...]]] = {}
    for rank, known in enumerate(reading.typed(tuple[dict[str, Any], ...], document.get("ranks"), "ranks")):
        where = f"ranks[{rank}].calls"
        calls = reading.typed(tuple[Any, ...], known.get("calls"), where)
        made = [plain.call(call, f"{where}[{place}]") for place, call in enumerate(calls)]
        traces[rank], times[rank] = tuple(call for call, _ in made), [moments for _, moments in made]
    return of_ranks(traces, times, plain.failure(document.get("failure"), "failure"))


_OF_ALL_RANKS: Final = {"traceEvents": chrome.read, "world_size": _simulated}
"""What a file of fsdpcheck has at its top, and how it is read."""
