"""What a night holds: nightly tests, laws, the soak, misbehaving sessions, branches, power, claims, tables.

Tests of the day are no part of it. Nightly laws of pytest are: each law is judged on each honest adapter below.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Final

from benchmarks import sessions as misbehaving
from benchmarks import soak
from benchmarks.branches.rows import ROWS
from benchmarks.kept import Kept
from benchmarks.night import reading
from benchmarks.night.record import ROOT
from benchmarks.night.slices import FOLDER, LONGEST, Part, Slice, packed
from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.impl import faults
from fsdpcheck.judging.registry import chapters
from fsdpcheck.studies.claims import registry
from fsdpcheck.studies.power.measure import FAMILIES

_CODE: Final = ("fsdpcheck", "impl", "properties")
_SHARED: Final = (*("common", "toys", "public_bugs", "conftest.py", "witnesses.json", "tokens.json"),)
"""What below tests/ any test may depend on besides its own folder."""
_IMPORTED: Final = re.compile(r"^ *(?:from|import) tests\.(\w+)", re.MULTILINE)
_PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
_PROFILE: Final = "ci"
"""How many cases of a law a night has: other ones each night, so nights add up. The profile nightly takes five."""
_LAW, _TEST = 14.0, 6.0
"""Processor seconds of a law or a test that nobody has measured."""
_START: Final = 4.0
"""Processor seconds until a command has begun."""
_SLOW: Final = {
    "tests/benchmarks/test_compared": 12.0,
    "tests/benchmarks/": 120.0,
    "tests/house/": 20.0,
    "tests/public_bugs/": 10.0,
}
_SOAK, _SESSIONS = 3, 24
"""Slices of the soak, of 8 minutes each, and of all misbehaving sessions, of which a night has a third."""
_THIRD: Final = 3
_TABLES: Final[tuple[tuple[tuple[str, ...], float], ...]] = (
    (("schedules", "200"), 150.0),
    (("processes", "100"), 200.0),
    (("deadlocks",), 60.0),
    (("accuracy",), 60.0),
    (("acceptance",), 400.0),
    (("steps",), 400.0),
    (("coverage", "60"), 600.0),
    (("private",), 200.0),
)
"""Studies that documents quote, whole; ``diagnosis``, which is long, is cut below.

``laws`` is none of them: that each fault is killed by drawn cases is a nightly test.
"""


def tests(folder: str, measured: Mapping[str, float], seed: int) -> Iterator[Slice]:
    """All tests of a folder that are marked nightly, packed.

    Asked for by name alone: which rows of a test are nightly is counted over all of them, and a pack may hold some.
    """
    rows = ("-p", "benchmarks.night.pytest_rows", "--night-rows", f"{FOLDER}/rows.jsonl")
    expected = _expected(measured, _of_a_test)
    for pack in packed(_nightly().get(folder, ()), expected):
        yield Slice(folder, tuple(pack), (*_PYTEST, *rows, *pack), sum(map(expected, pack)), reading.tests)


@cache
def _nightly() -> dict[str, list[str]]:
    """Folder of tests -> the nightly ones in it, as pytest collects them."""
    every = [*_PYTEST, "-m", "nightly", "--collect-only", "tests"]
    asked = subprocess.run(every, cwd=ROOT, capture_output=True, text=True, check=False)
    ids = [line for line in asked.stdout.splitlines() if "::" in line]
    if asked.returncode or not ids:
        raise RuntimeError(f"pytest collected {len(ids)} tests, exit code {asked.returncode}: {asked.stdout[-500:]}")
    found: dict[str, list[str]] = {}
    for name in ids:
        found.setdefault("/".join(name.split("/")[:2]), []).append(name)
    return found


def laws(measured: Mapping[str, float], seed: int) -> Iterator[Slice]:
    """Each law on each honest adapter that promises it.

    Laws of one space stand together, for they share cases and executions.
    """
    known = {**_by_the_soak(), **measured}
    for adapter, ranks in soak.honest():
        sizes = ",".join(map(str, ranks))
        names = {_law(adapter, sizes, law): law for law in _by_space(soak.promised(adapter))}
        expected = _expected(known, _LAW)
        for pack in packed(names, expected, LONGEST - _START):
            asked = [word for name in pack for word in ("--law", names[name])]
            asked += ["--world-size", sizes] if sizes else []
            command = ("fsdpcheck", "run", "--adapter", adapter, *asked, "--profile", _PROFILE, "--seed", str(seed))
            report = ("-j1", "--json", f"{FOLDER}/report.json")
            run = (sys.executable, "-m", *command, *report)
            yield Slice("laws", tuple(pack), run, _START + sum(map(expected, pack)), reading.laws, seed)


def _by_space(names: Iterable[str]) -> list[str]:
    """Laws in the order of the first law of their space."""
    spaces: dict[object, list[str]] = {}
    for name in names:
        spaces.setdefault(chapters()[name].space.drawn.key, []).append(name)
    return [name for together in spaces.values() for name in together]


def soaked(measured: Mapping[str, float], seed: int) -> Iterator[Slice]:
    """Honest adapters on cases of other seeds, for a while."""
    for part in range(1, _SOAK + 1):
        command = ("benchmarks", "soak", "8", f"{FOLDER}/rows.jsonl", str(seed + 1), "--shard", f"{part}/{_SOAK}")
        yield _slice("soak", f"{part}/{_SOAK}", command, 480.0, reading.soak, seed + 1)


def sessions(measured: Mapping[str, float], seed: int) -> Iterator[Slice]:
    """Implementations that misbehave, each by one way in: of three nights with seeds in a row each has another."""
    ways = len(misbehaving.WAYS)
    for part in range(1, _SESSIONS + 1):
        if (part - 1) % ways != ((part - 1) // ways + seed) % ways:
            continue
        command = ("benchmarks", "sessions", "120", f"{FOLDER}/rows.jsonl", "--shard", f"{part}/{_SESSIONS}")
        name = f"{part}/{_SESSIONS}"
        yield _slice("sessions", name, command, _expected(measured, 300.0)(name), reading.sessions)


def reached(measured: Mapping[str, float], seed: int) -> Iterator[Slice]:
    """Sessions that reach branches of the reference, each of which must take what it was the first to take: a third."""
    for number, row in enumerate(ROWS):
        if (number + seed) % _THIRD == 0:
            yield _slice(
                "branches", row.name, ("benchmarks", "branches-now", row.name), _expected(measured, 90.0)(row.name)
            )


def power(measured: Mapping[str, float], seed: int) -> Iterator[Slice]:
    """How small an error is found, family by family; a false alarm is a failure."""
    for family in FAMILIES:
        command = ("fsdpcheck", "power", "--family", family.name)
        yield _slice("power", family.name, command, _expected(measured, 150.0)(family.name))


def claims(measured: Mapping[str, float], seed: int) -> Iterator[Slice]:
    """Each row of the ledger has a verdict; that it is the document's is asked by a nightly test."""
    for one in registry.all_claims():
        yield _slice("claims", one.id, ("fsdpcheck", "claims", one.id), _expected(measured, 15.0)(one.id))


def tables(measured: Mapping[str, float], seed: int) -> Iterator[Slice]:
    """Studies that documents quote run through, and runs that must agree do."""
    cut = [(("diagnosis", "0", f"{letter}*"), 60.0) for letter in sorted({name[0] for name in faults.ALL})]
    for arguments, seconds in (*_TABLES, *cut):
        name = " ".join(arguments)
        yield _slice("tables", name, ("benchmarks", *arguments), _expected(measured, seconds)(name), reading.study)


def _of_tests() -> Iterator[Part]:
    """A part for each folder of tests: a test that is mended asks for no other folder again."""
    for folder in sorted({path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").glob("*/**/test_*.py")}):
        name = f"tests/{folder}"
        below = (f"tests/{each}" for each in sorted({*_SHARED, *imported(folder)}))
        yield Part(name, "tests that are marked nightly", (*_CODE, *below), partial(tests, name))


def imported(folder: str) -> set[str]:
    """The folder and all others below tests/ of which its files, or theirs, import something."""
    found: set[str] = set()
    left = {folder}
    while left:
        found |= left
        files = [path for name in left for path in (ROOT / "tests" / name).rglob("*.py")]
        files += (ROOT / "benchmarks").rglob("*.py") if "benchmarks" in left else []
        left = {name for path in files for name in _IMPORTED.findall(path.read_text(encoding="utf-8"))} - found
    return found


PARTS: Final[tuple[Part, ...]] = (
    *_of_tests(),
    Part("laws", f"each law on each honest adapter, {PROFILES[_PROFILE]} cases", _CODE, laws),
    Part("soak", "honest adapters on other seeds", _CODE, soaked),
    Part("sessions", "implementations that misbehave, each by one of three ways in", _CODE, sessions),
    Part("branches", "branches of the reference that a third of the sessions reach", _CODE, reached),
    Part("power", "how small an error is found", _CODE, power),
    Part("claims", "what people say, measured", _CODE, claims),
    Part("tables", "studies that documents quote", _CODE, tables),
)


def _law(adapter: str, ranks: str, law: str) -> str:
    return f"{adapter}{f' on {ranks}' * bool(ranks)} {law}"


def _by_the_soak() -> dict[str, float]:
    """Law on an adapter -> processor seconds, of the soak's record: as many cases as the night has."""
    found = {}
    for row in Kept(str(soak.RECORD), "adapter", "ranks", "law", "seed").rows:
        seconds = row["processor seconds"] / max(1, row["cases"]) * PROFILES[_PROFILE]
        found[_law(row["adapter"], row["ranks"], row["law"])] = seconds
    return found


def without() -> list[str]:
    """Honest adapters that are not installed, so that no night here holds them."""
    return sorted({name for name, _ in soak.HONEST} - {name for name, _ in soak.honest()})


def _slice(part: str, item: str, command: tuple[str, ...], seconds: float, *more: object) -> Slice:
    return Slice(part, (item,), (sys.executable, "-m", *command), seconds, *more)  # type: ignore[arg-type]


def _expected(measured: Mapping[str, float], otherwise: float | Callable[[str], float]) -> Callable[[str], float]:
    """Seconds of an item: as measured, or the estimate."""
    return partial(_measured_or, measured, otherwise)


def _measured_or(measured: Mapping[str, float], otherwise: float | Callable[[str], float], item: str) -> float:
    if item in measured:
        return measured[item]
    return otherwise if isinstance(otherwise, float) else otherwise(item)


def _of_a_test(name: str) -> float:
    return next((seconds for folder, seconds in _SLOW.items() if name.startswith(folder)), _TEST)
