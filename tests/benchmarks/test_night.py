"""A night resumes, tells what failed, deals its slices out exactly, and is whole when nothing is left."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("benchmarks.night", reason="only a checkout has the benchmarks")
from benchmarks.night import reading, record, runner, tonight  # noqa: E402
from benchmarks.night.parts import sessions  # noqa: E402
from benchmarks.night.record import Record, words  # noqa: E402
from benchmarks.night.slices import FOLDER, Outcome, Part, Slice, packed, shard_of  # noqa: E402
from benchmarks.night.tonight import Night, listed, night, standing, taken  # noqa: E402
from benchmarks.sessions import everything  # noqa: E402
from tests.common.tables import each  # noqa: E402

NAMES = ("one", "two", "three", "four", "five")


class Toy:
    """A night of five slices over a folder of one file: each says its name in a file, and ends with its code."""

    def __init__(self, folder: Path) -> None:
        self.root, self.path, self.ran = folder, folder / "night.jsonl", folder / "ran"
        self.codes: dict[str, object] = {}
        """The end of a slice, by its name: a code, or an expression."""
        self.change("first")

    def change(self, content: str) -> None:
        (self.root / "code").mkdir(exist_ok=True)
        (self.root / "code" / "file.py").write_text(content)

    @property
    def night(self) -> Night:
        return night([Part("toys", "slices that end at once", ("code",), self._cut)], Record(self.path), self.root)

    def sit(self, shard: tuple[int, int] = (1, 1), minutes: float | None = None) -> tuple[list[str], int]:
        """What a sitting says, and its exit code."""
        said: list[str] = []
        try:
            said += _each(taken(self.night, shard, minutes, ()), said)
        except SystemExit as end:
            return said, int(str(end.code))
        return said, 0

    @property
    def told(self) -> list[str]:
        """Names of the slices that ran, in the order they ended."""
        return self.ran.read_text().split() if self.ran.exists() else []

    def _cut(self, measured: Mapping[str, float], seed: int) -> Iterator[Slice]:
        for name in NAMES:
            program = f"import os, signal; open({str(self.ran)!r}, 'a').write('{name} '); " + "raise SystemExit({})"
            program = program.format(self.codes.get(name, 0))
            yield Slice("toys", (name,), (sys.executable, "-S", "-c", program), measured.get(name, 7.0), seed=seed)


def _each(lines: Iterator[str], said: list[str]) -> list[str]:
    for line in lines:
        said.append(line)
    return []


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def test_a_sitting_runs_what_the_record_lacks_and_nothing_twice(toy: Toy) -> None:
    toy.sit((1, 2))
    assert toy.told == ["one", "three", "five"]
    said, code = toy.sit()
    assert code == 0
    assert said[0] == "3 of 5 slices of shard 1/1 are in the record"
    assert sorted(toy.told) == sorted(NAMES)
    assert [line for line in toy.sit()[0] if line.startswith("[")] == []


def test_a_sitting_begins_no_slice_after_its_time(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=iter(range(0, 1000, 50)).__next__)
    monkeypatch.setattr(tonight, "time", clock)
    said, _ = toy.sit(minutes=2)
    assert len(toy.told) == 2
    assert "3 slices are left after 2 minutes; next: the same again" in said


def test_a_slice_that_fails_is_a_line_with_its_end_and_the_code_stays_red(toy: Toy) -> None:
    toy.codes["two"] = 3
    said, code = toy.sit()
    assert code == 1
    assert toy.told == list(NAMES), "the slices behind it run too"
    assert any(line.startswith("FAILED toys: exit code 3") for line in said)
    row = json.loads(toy.path.read_text().splitlines()[1])
    assert (row["passed"], row["failed"], row["code"]) == (0, 1, 3)
    assert toy.sit()[1] == 1, "a later sitting knows of it"
    assert toy.told == list(NAMES)


def test_other_content_is_another_night_with_another_seed_and_knows_what_the_last_one_took(toy: Toy) -> None:
    toy.sit()
    before = toy.night.slices
    toy.change("second")
    after = toy.night.slices
    assert len(toy.night.left) == len(NAMES)
    assert {one.seed for one in before}.isdisjoint(one.seed for one in after)
    assert {one.seconds for one in before} == {7.0}, "what is cut does not move while it runs"
    assert all(one.seconds < 7.0 for one in after)
    toy.change("first")
    assert toy.night.left == []


def test_equal_content_has_equal_digests_whatever_python_leaves_there(toy: Toy) -> None:
    before = record.digest(("code",), toy.root)
    (toy.root / "code" / "__pycache__").mkdir()
    (toy.root / "code" / "__pycache__" / "file.pyc").write_bytes(b"\0")
    assert record.digest(("code",), toy.root) == before
    (toy.root / "code" / "file.py").rename(toy.root / "code" / "renamed.py")
    assert record.digest(("code",), toy.root) != before


def test_a_slice_on_another_torch_counts_for_nothing(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.sit()
    monkeypatch.setattr(record, "release", lambda: "9.9.9")
    assert len(toy.night.left) == len(NAMES)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_shards_are_a_partition(toy: Toy, count: int) -> None:
    slices = toy.night.slices
    dealt = [one for part in range(1, count + 1) for one in shard_of(slices, (part, count))]
    assert sorted(one.name for one in dealt) == sorted(one.name for one in slices)


def test_a_slice_that_is_interrupted_leaves_no_line_and_is_run_again(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = runner.row_of

    def interrupted(one: Slice) -> record.Row:
        if one.items == ("three",):
            raise KeyboardInterrupt
        return ended(one)

    monkeypatch.setattr(tonight, "row_of", interrupted)
    said, code = toy.sit()
    assert code == 130
    assert "interrupted in toys: three; what had ended is kept" in said
    monkeypatch.setattr(tonight, "row_of", ended)
    assert toy.sit()[1] == 0
    assert toy.told == list(NAMES)


def test_a_slice_that_somebody_ended_leaves_no_line_those_behind_it_run_and_the_code_is_red(toy: Toy) -> None:
    toy.codes["two"] = "os.kill(os.getpid(), signal.SIGKILL)"
    said, code = toy.sit()
    assert code == 1
    assert toy.told == list(NAMES)
    assert (
        "[2/5] ENDED  toys: two: by SIGKILL, by somebody or for want of memory; no line, next: the same again" in said
    )
    assert [one.items for one in toy.night.left] == [("two",)]
    del toy.codes["two"]
    assert toy.sit()[1] == 0
    assert toy.told == [*NAMES, "two"]


def test_a_crash_of_a_slice_is_a_line_of_it(toy: Toy) -> None:
    """A process that ends itself by a signal has a mistake."""
    toy.codes["two"] = "os.abort()"
    assert toy.sit()[1] == 1
    assert toy.night.left == []
    assert json.loads(toy.path.read_text().splitlines()[1])["findings"][0].startswith("exit code -6")


def test_a_line_that_was_cut_off_is_no_row_and_spoils_no_other(toy: Toy) -> None:
    toy.sit((1, 5))
    whole = toy.path.read_text()
    toy.path.write_text(whole + whole[: len(whole) // 2])
    toy.sit((2, 5))
    assert toy.told == ["one", "two"]
    assert len(toy.night.left) == 3


def test_what_interrupts_a_slice_ends_its_processes(tmp_path: Path) -> None:
    """A slice that lasts, ended by SIGTERM to the sitting: its process is gone, and the sitting says so."""
    own = f"""
import sys
from benchmarks.night.runner import row_of
from benchmarks.night.slices import Slice
program = "import os, signal; open({str(tmp_path / "pid")!r}, 'w').write(str(os.getpid()))\\n"
program += "os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
row_of(Slice("toys", ("lasting",), (sys.executable, "-c", program), 1.0))
"""
    ended = subprocess.run([sys.executable, "-c", own], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in ended.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_slice_that_does_not_end_is_told(tmp_path: Path) -> None:
    lasting = Slice("toys", ("lasting",), (sys.executable, "-c", "import signal; signal.pause()"), 1.0)
    row = runner.row_of(lasting, guard=0.1)
    assert (row["failed"], row["code"]) == (1, None)
    assert row["findings"][0].startswith("it did not end")


def test_an_end_that_cannot_be_read_is_no_pass() -> None:
    def raises(folder: Path, output: str, asked: Slice) -> Outcome:
        return Outcome(passed=int((folder / "report.json").read_text()))

    row = runner.row_of(Slice("toys", ("silent",), (sys.executable, "-S", "-c", ""), 1.0, raises))
    assert (row["passed"], row["failed"]) == (0, 1)
    assert "FileNotFoundError" in row["findings"][0]


def test_a_test_that_failed_or_did_not_run_is_a_finding(tmp_path: Path) -> None:
    rows = [{"id": name, "outcome": name, "seconds": 2.0} for name in ("passed", "skipped", "failed")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = Slice("tests", ("passed", "skipped", "failed", "gone"), (), 1.0)
    outcome = reading.tests(tmp_path, "", asked)
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, 2, 1)
    assert outcome.findings == ("failed", "did not run: gone")


def test_a_slice_of_tests_says_how_many_cases_they_judged(tmp_path: Path) -> None:
    """The plugin writes what a test has told, and the row has it test by test; one that tells nothing has none."""
    text = "def test_tells(record_property):\n    record_property('cases', 7)\n\n\ndef test_is_silent():\n    pass\n"
    (tmp_path / "test_toy.py").write_text(text)
    plugin = ("-p", "benchmarks.night.pytest_rows", "--night-rows", f"{FOLDER}/rows.jsonl", "--rootdir", str(tmp_path))
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, str(tmp_path / "test_toy.py"))
    row = runner.row_of(Slice("toys", ("test_toy.py::test_tells",), command, 1.0, reading.tests))
    assert (row["passed"], row["failed"], row["cases"]) == (2, 0, 7), row
    assert row["judged"] == {"test_toy.py::test_tells": 7}
    assert "judged" not in runner.row_of(Slice("toys", ("silent",), (sys.executable, "-S", "-c", ""), 1.0))


@each("statuses", [("holds", "finding"), ("holds", "too few cases"), ("error",)])
def test_a_law_that_does_not_hold_is_a_finding(tmp_path: Path, statuses: tuple[str, ...]) -> None:
    row = {"adapter": "a", "cases": 3, "finding": None, "seconds": 2.0}
    verdicts = [{**row, "law": f"b.{number}", "status": status} for number, status in enumerate(statuses)]
    (tmp_path / "report.json").write_text(json.dumps({"verdicts": verdicts}))
    asked = Slice("laws", tuple(f"a {verdict['law']}" for verdict in verdicts), (), 1.0)
    outcome = reading.laws(tmp_path, "", asked)
    assert (outcome.passed, outcome.failed, outcome.cases) == (len(statuses) - 1, 1, 3 * len(statuses))
    assert outcome.findings == (f"a b.{len(statuses) - 1} {statuses[-1]}",)
    assert outcome.seconds == dict.fromkeys(asked.items, 2.0)
    (tmp_path / "report.json").write_text('{"verdicts": []}')
    assert reading.laws(tmp_path, "", asked).findings == tuple(f"no verdict: {item}" for item in asked.items)


def test_laws_of_one_space_are_judged_by_one_process() -> None:
    from benchmarks.night.parts import PARTS
    from fsdpcheck.judging.registry import chapters

    (laws,) = (part for part in PARTS if part.name == "laws")
    slices = [[item.rpartition(" ")[::2] for item in one.items] for one in laws.slices({}, 7)]
    split = 0
    for one in slices:
        keys = [(adapter, chapters()[law].space.drawn.key) for adapter, law in one]
        assert len({adapter for adapter, _ in keys}) == 1
        split += len(keys) - len({*keys})
        assert [key for key, _ in itertools.groupby(keys)] == [*dict.fromkeys(keys)]
    assert split > len(slices), "few spaces are shared"


def test_runs_that_must_agree_and_do_not_are_a_finding(tmp_path: Path) -> None:
    asked = Slice("tables", ("schedules",), (), 1.0)
    agree, differ = (reading.study(tmp_path, f"reversed: {n} of 7 cases agree in every bit", asked) for n in (7, 6))
    assert (agree.failed, agree.cases, differ.failed, differ.passed) == (0, 7, 1, 0)


def test_packs_keep_the_order_and_only_what_is_long_by_itself_is_longer() -> None:
    seconds = {"a": 4.0, "b": 5.0, "c": 2.0, "d": 30.0, "e": 1.0, "f": 9.0}
    packs = list(packed(seconds, seconds.__getitem__, 10.0))
    assert packs == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_a_night_is_whole_once_all_shards_are_done(toy: Toy) -> None:
    toy.sit((1, 2))
    assert toy.night.record.last_whole is None
    toy.sit((2, 2))
    row = toy.night.record.last_whole
    assert row is not None
    assert (row["slices"], row["failed"], row["seeds"]) == (5, 0, [toy.night.slices[0].seed])
    toy.sit()
    assert toy.path.read_text().count(record.WHOLE) == 1
    assert words(row) in toy.sit()[0]


def test_what_is_done_and_what_is_left_is_shown(toy: Toy) -> None:
    toy.sit((1, 5))
    assert next(listed(toy.night, (1, 1))) == "done      7 s  toys: one"
    said = list(standing(toy.night))
    assert said[0].startswith("toys        1 of    5 slices, 0 failed; left: 0.0 hours")
    assert said[-1] == "Last whole night: none yet."
    toy.sit()
    last = list(standing(toy.night))[-1]
    assert re.search(r"^Last whole night: .* 5 slices, 0 cases, 0 failed\. Its age: 0 days\.$", last)


def test_every_part_of_the_project_is_cut_into_slices_that_say_what_they_run() -> None:
    from benchmarks.night.parts import PARTS

    for part in PARTS:
        if part.kind == "tests":  # they are collected, which takes longer than a test may
            continue
        slices = list(part.slices({}, 7))
        assert slices, part.name
        items = [item for one in slices for item in one.items]
        assert len(set(items)) == len(items), part.name
        assert {one.part for one in slices} == {part.name}
        assert all(one.seed in (None, 7, 8) for one in slices)


def test_a_test_that_is_mended_asks_for_its_folder_and_for_those_that_import_of_it() -> None:
    from benchmarks.night.parts import _SHARED, PARTS, imported

    own = {part.name: set(part.folders) for part in PARTS if part.kind == "tests"}
    assert {name for name, depends in own.items() if "tests/cli" in depends} == {"tests/cli"}
    of_simulation = {name for name, depends in own.items() if "tests/simulation" in depends}
    assert of_simulation == {f"tests/{name}" for name in ("simulation", "engines", "process_state")}
    for depends in own.values():
        assert {f"tests/{name}" for name in _SHARED} <= depends
        assert all((ROOT / name).exists() for name in depends)
    assert {"common", "toys"} == imported("common") | imported("toys"), "what all tests share depends on nothing else"


def test_a_pack_of_tests_is_asked_for_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A marker would leave some out: of a test with rows by day, rows are counted over those that are requested."""
    from benchmarks.night import parts

    monkeypatch.setattr(parts, "_nightly", lambda: {"tests/cli": ["tests/cli/test_cli.py::test_row[4]"]})
    (one,) = parts.tests("tests/cli", {}, 7)
    assert one.items == ("tests/cli/test_cli.py::test_row[4]",)
    assert one.command[-1] == one.items[0]
    assert [word for word in one.command if word.startswith("-m")] == ["-m"], "of python -m pytest"


def test_the_readme_says_which_night_was_the_last_whole_one() -> None:
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert words(Record().last_whole) in said, "next: put this sentence in the README"


def test_a_slice_counts_processor_time_whatever_the_clock_told_of_its_items() -> None:
    """On a busy machine the clock goes on while others compute: only the proportions of its seconds are taken."""
    told = Outcome(passed=2, seconds={"one": 300.0, "two": 100.0})
    busy = Slice("toys", ("one", "two"), (sys.executable, "-S", "-c", "sum(range(10**7))"), 1.0, lambda *_: told)
    row = runner.row_of(busy)
    spent = row["processor"]
    assert 0 < spent < 300
    assert round(10 * abs(sum(row["items"].values()) - spent)) <= 1  # each of the two is rounded to a tenth
    assert runner._shares(("one", "two", "three"), {"one": 3.0, "two": 1.0}) == {
        "one": 0.5,
        "two": 1 / 6,
        "three": 1 / 3,
    }
    assert runner._shares(("one", "two"), {}) == {"one": 0.5, "two": 0.5}


def test_a_night_has_each_that_misbehaves_by_one_way_and_three_nights_by_all() -> None:
    asked = everything()

    def tonight_of(seed: int) -> list[tuple[str, str]]:
        shards = [tuple(map(int, item.split("/"))) for one in sessions({}, seed) for item in one.items]
        return [pair for k, n in shards for pair in asked[k - 1 :: n]]

    three = [tonight_of(seed) for seed in (5, 6, 7)]
    assert all(sorted(what for what, _ in one) == sorted({what for what, _ in asked}) for one in three)
    assert sorted(itertools.chain(*three)) == sorted(asked)
