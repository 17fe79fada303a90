"""The matrix of faults: each outcome is met, a kill is one that the fault makes, and rows are kept and taken over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fsdpcheck import cli
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import FINDING, HOLDS, USAGE, UsageError
from fsdpcheck.execution import Execution, RankResult, RunRequest
from fsdpcheck.findings.tokens import Token, decode
from fsdpcheck.report import colour
from fsdpcheck.report import faults as report
from fsdpcheck.report.page import faults as page
from fsdpcheck.studies.faults import origins
from fsdpcheck.studies.faults.matrix import OUTCOMES, Matrix, Row, Watching, counts
from tests.common.cases_by_hand import SMALLEST

ADAPTER = Path(__file__).parents[3] / "docs" / "examples" / "data_parallel.py"
OWN = '''
from contextlib import contextmanager
import torch.distributed as dist
from torch.optim import SGD


class Hits:
    hits = 0


@contextmanager
def put(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value(before))
    try:
        yield Hits
    finally:
        setattr(owner, name, before)


def counted(value):
    def called(*args, **options):
        Hits.hits += 1
        return value(*args, **options)
    return called


def not_reduced():
    """Gradients stay what each rank has."""
    Hits.hits = 0
    return put(dist, "all_reduce", lambda before: counted(lambda *args, **options: None))


def doubled():
    """What is reduced is doubled."""
    Hits.hits = 0
    return put(dist, "all_reduce", lambda before: counted(lambda tensor: before(tensor) or tensor.mul_(2)))


def raises():
    """The reduction raises."""
    Hits.hits = 0
    return put(dist, "all_reduce", lambda before: counted(lambda *args, **options: 1 / 0))


def the_same():
    """Nothing is altered, and counted all the same."""
    Hits.hits = 0
    return put(dist, "all_reduce", lambda before: counted(before))


def elsewhere():
    """A collective that nobody calls."""
    Hits.hits = 0
    return put(dist, "all_to_all", lambda before: counted(before))
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "dp.py").write_text(ADAPTER.read_text())
    (folder / "own.py").write_text(OWN)
    return folder


@pytest.fixture(scope="module")
def rows(own: Path) -> dict[str, Row]:
    matrix = Matrix(("training.plain",), cases=3, world_sizes=(2,))
    try:
        found = origins.of_module(str(own / "own.py"), "*", [f"{own / 'dp.py'}:adapter"])
        return {one.name: matrix.row(one) for one in found}
    finally:
        matrix.engine.close()


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("not_reduced", "killed"),
        ("doubled", "killed"),
        ("raises", "raises at once"),
        ("the_same", "changes nothing"),
        ("elsewhere", "never ran"),
    ],
)
def test_outcomes(rows: dict[str, Row], fault: str, outcome: str) -> None:
    assert rows[fault].outcome == outcome
    assert rows[fault].says
    assert bool(rows[fault].kills) == (outcome in ("killed", "raises at once"))


def test_a_kill_has_a_token_that_replays_it(rows: dict[str, Row]) -> None:
    kill = rows["not_reduced"].kills[0]
    token = decode(kill.token)
    assert (token.law, token.installs) == (kill.law, rows["not_reduced"].installs)
    assert kill.law == "training.plain"


def test_what_changes_nothing_that_is_saved_is_said_to() -> None:
    """Also where a save writes into an empty folder only, and tells all ranks its name."""
    name = "fsdpcheck.impl.state.planners/_check_equal/constant.1"
    mutant = origins.Planted(name, (f"fsdpcheck.studies.faults.mutants:{name}",), ("reference",), "rank 1 is left out")
    matrix = Matrix(("state.resumed",), cases=2, world_sizes=(2,))
    try:
        assert matrix.row(mutant).outcome == "changes nothing"
    finally:
        matrix.engine.close()


class _Saving:
    """An engine of no ranks that notes where it is to save and to load, and finds in a folder its last word."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, str]] = []

    def run(self, request: RunRequest) -> Execution:
        self.asked.append((len(request.installs), request.save_to, request.load_from))
        return Execution("none", request, [])

    def stored(self, reference: str, folder: str) -> list[str]:
        return [folder[-3:]]


def test_what_is_saved_without_a_fault_is_what_is_loaded_without_it() -> None:
    engine = _Saving()
    watching = Watching(cast(Any, engine))
    request = RunRequest(SMALLEST, "any", installs=("fault",))
    watching.run(replace(request, save_to="saved/to"))
    watching.run(replace(request, load_from="saved/to/0"))
    watching.run(replace(request, load_from="elsewhere"))
    assert engine.asked[:2] == [(1, "saved/to", ""), (0, "saved/t~", "")]
    assert engine.asked[2:] == [
        (1, "", "saved/to/0"), (0, "", "saved/t~/0"), (1, "", "elsewhere"), (0, "", "elsewhere"),
    ]  # fmt: skip
    assert watching.difference == ""
    watching.stored("any", "saved/to/0")
    assert "a checkpoint holds" in watching.difference, "the last word of the one folder is not that of the other"


class _Varying(_Saving):
    """The same, with a result that is another each time, or one that what is installed makes another."""

    def __init__(self, varies: bool) -> None:
        super().__init__()
        self.varies = varies

    def run(self, request: RunRequest) -> Execution:
        super().run(request)
        seen = len(self.asked) if self.varies else len(request.installs)
        return Execution("none", request, [RankResult(0, initial={"weight": torch.tensor(float(seen))})])


def test_a_case_that_gives_something_else_each_time_makes_no_difference() -> None:
    """As noise of a generator that nobody can seed does, and what is saved of it, loaded and read."""
    request = RunRequest(SMALLEST, "any", installs=("fault",))
    engine = _Varying(True)
    watching = Watching(cast(Any, engine))
    watching.run(replace(request, save_to="saved/to"))
    assert engine.asked == [(1, "saved/to", ""), (0, "saved/t~", ""), (0, "saved/t^", "")]
    watching.run(replace(request, load_from="saved/to/0"))
    watching.stored("any", "saved/to/0")
    assert engine.asked[3:] == [(1, "", "saved/to/0")]
    assert watching.difference == ""
    watching = Watching(cast(Any, _Varying(False)), law="norms.sum")
    watching.run(request)
    told, token = watching.difference.split(", in ")
    assert told == "rank 0, before the first step, weight: 1.0 (element 0) instead of 0.0 (element 0)"
    assert decode(token) == Token("norms.sum", "any", SMALLEST, ("fault",))


class _Once(_Varying):
    """The same, with another result once."""

    def run(self, request: RunRequest) -> Execution:
        return super().run(replace(request, installs=request.installs if not self.asked else ()))


def test_what_differs_once_makes_no_difference() -> None:
    """As a collective of a checkpoint once did, and in 40 more runs of its case did not."""
    watching = Watching(cast(Any, _Once(False)))
    request = RunRequest(SMALLEST, "any", installs=("fault",))
    watching.run(replace(request, save_to="saved/to"))
    watching.stored("any", "saved/to/0")
    assert watching.difference == ""


def test_what_a_law_cannot_see_survives(own: Path) -> None:
    """The fault takes effect, and the law looks at collectives alone."""
    (fault,) = origins.of_module(str(own / "own.py"), "doubled", [f"{own / 'dp.py'}:adapter"])
    row = Matrix(("collectives.plain",), cases=3, world_sizes=(2,)).row(fault)
    assert (row.outcome, row.laws, row.cases) == ("survived", 1, 3)
    assert row.note.startswith("differs: rank 0, step 0, ")


def test_a_law_that_breaks_without_the_fault_kills_nothing(own: Path) -> None:
    (own / "wrong.py").write_text(ADAPTER.read_text().replace("/= self.setup.world_size", "/= 1.0"))
    row = Matrix(("training.plain",), cases=3, world_sizes=(2,)).row(
        origins.of_module(str(own / "own.py"), "the_same", [f"{own / 'wrong.py'}:adapter"])[0]
    )
    assert row.kills == ()


@pytest.mark.parametrize(("breaks", "outcome"), [("always", "not asked"), ("when_planted", "raises at once")])
def test_a_law_that_ends_in_an_error_without_the_fault_kills_nothing(own: Path, breaks: str, outcome: str) -> None:
    """A trainer that shows no parameters breaks its protocol, whatever is planted."""
    (own / f"{breaks}.py").write_text(
        ADAPTER.read_text().replace(
            "return {name: value.detach().clone() for name, value in self.model.named_parameters()}",
            "shown = {name: value.detach().clone() for name, value in self.model.named_parameters()}\n"
            f"        return None if {breaks == 'always'} or dist.all_reduce.__name__ == 'called' else shown",
        )
    )
    (fault,) = origins.of_module(str(own / "own.py"), "the_same", [f"{own / f'{breaks}.py'}:adapter"])
    row = Matrix(("training.plain",), cases=3, world_sizes=(2,)).row(fault)
    assert row.outcome == outcome, row


def test_every_law_is_asked_where_all_are_wanted(engine: SimulatedEngine) -> None:
    fault = origins.of_the_reference("complete_norms_summed")
    chosen = {"globs": ("norms.*",), "cases": 4, "world_sizes": (2,), "engine": engine}
    first, every = Matrix(**chosen).row(fault[0]), Matrix(every=True, **chosen).row(fault[0])
    assert len(first.kills) == 1 < len(every.kills)
    assert report.kills_by_law([first]) == []
    assert sum(kills for _, kills, _ in report.kills_by_law([every])) == len(every.kills)


def test_pairs_are_drawn_and_both_in_place() -> None:
    found = origins.of_the_reference("*norm*")
    drawn = origins.pairs(found, 5, 1)
    assert len({one.name for one in drawn}) == 5
    assert all(len(one.installs) == 2 and one.adapters for one in drawn)
    assert [one.name for one in drawn] != [one.name for one in origins.pairs(found, 5, 2)]


def test_reports_tell_all_outcomes_and_escape() -> None:
    rows = [Row(f"<{outcome}>", outcome, "says | so", "file.py:3") for outcome in OUTCOMES]
    assert dict(counts(rows)) == dict.fromkeys(OUTCOMES, 1)
    plain = report.text(rows, colour.uncoloured, {})
    assert "survived: " in plain
    assert "1 never ran" in plain
    assert "of 2 that take effect 1 are killed (50.0 %)" in plain
    reasoned = report.text(rows, colour.uncoloured, {"<survived>": "the same by commuting", "<killed>": "thought so"})
    assert "the same by commuting" in reasoned
    assert "written down as equivalent and killed: <killed>" in reasoned
    assert "of 1 that take effect 1 are killed (100 %)" in reasoned
    assert "that take effect" not in report.summary(rows[3:], {})
    assert "says \\| so" in report.markdown(rows, {})
    html = page.text(rows, {})
    assert "&lt;survived&gt;" in html
    assert "<survived>" not in html
    assert "1 of 6 faults survive" in html
    assert [Row.from_data(one.to_data()) for one in rows] == rows


def command(own: Path, *words: str) -> int:
    chosen = ["--law", "training.plain", "--cases", "2", "--world-size", "2"]
    return cli.main(["faults", "--adapter", f"{own / 'dp.py'}:adapter", *chosen, *words])


def test_the_command_keeps_rows_and_takes_them_over(
    own: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keep, into = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    words = ("--from", str(own / "own.py"), "--keep", str(keep), "--json", str(into))
    assert command(own, *words) == HOLDS
    first, told = keep.read_text(), capfd.readouterr()
    assert "5/5" in told.err
    assert "5 faults: 2 killed, 1 raises at once, 1 changes nothing, 1 never ran" in told.out
    assert command(own, *words) == HOLDS
    assert keep.read_text() == first
    data = json.loads(into.read_text())
    assert [row["fault"] for row in data["rows"]] == ["not_reduced", "doubled", "raises", "the_same", "elsewhere"]
    assert data["counts"]["killed"] == 2
    assert command(own, *words, "--every") == HOLDS  # other options: what was found out stands for none of it
    assert len(keep.read_text().splitlines()) == 2 * len(first.splitlines())
    (own / "dp.py").write_text(ADAPTER.read_text() + "\n")  # other code: nothing of it is taken over
    assert command(own, *words) == HOLDS
    assert len(keep.read_text().splitlines()) == 3 * len(first.splitlines())


def test_mutants_of_a_file_of_ones_own(own: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = (
        "--mutants",
        "20",
        "--fault",
        "*Trainer.step/*",
        "--markdown",
        str(tmp_path / "m.md"),
        "--html",
        str(tmp_path / "m.html"),
    )
    code, told = command(own, *names), capfd.readouterr()
    assert code == (FINDING if " survived" in told.err else HOLDS)
    assert "mutants of the lines that cases run" in told.err
    assert "dp.py/Trainer.step/arithmetic.1: killed by training.plain" in told.err
    assert (tmp_path / "m.html").read_text().startswith("<!doctype html>")
    assert "| outcome |" in (tmp_path / "m.md").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--fault", "nonesuch"], "no fault matches 'nonesuch'"),
        (["--law", "norms.*,nonesuch"], "no law matches 'nonesuch'"),
        (["--from", "nowhere.py"], "there is no file"),
        (["--mutants", "3", "--from", "x.py"], "both"),
        (["--shard", "5/3"], "5 of 3"),
        (["--equivalent", "nowhere.json"], "nowhere.json"),
        (["--json", "/nonesuch/x.json"], "/nonesuch/x.json"),
    ],
)
def test_bad_input(own: Path, words: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(own, *words) == USAGE
    assert says in capfd.readouterr().err


@pytest.mark.parametrize(
    ("module", "text", "says"),
    [
        ("lacks", "import nowhere_to_be_found\n", "needs 'nowhere_to_be_found', which is not installed"),
        ("broken", "def f(:\n", "SyntaxError: invalid syntax"),
        ("absent.module", "", "no module 'absent' on the import path"),
    ],
)
def test_a_module_that_does_not_import_is_told(
    own: Path, module: str, text: str, says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name and as a file, where there is one; and where in it the import ends."""
    monkeypatch.chdir(own)
    if text:
        (own / f"{module}.py").write_text(text)
    for name in (module, str(own / f"{module}.py")) if text else (module,):
        assert command(own, "--from", name) == USAGE
        told = capfd.readouterr().err
        assert all(part in told for part in (f"--from {name}", says, "  got  ", "  wanted  ", "  next  ")), told
        assert not text or f"{module}.py:1: {text.strip()}" in told
        assert "Traceback" not in told


def test_a_module_without_faults_or_words_is_told(own: Path) -> None:
    adapter = f"{own / 'dp.py'}:adapter"
    for name, text, says in (
        ("none", "x = 1\n", "nothing to install"),
        ("mute", "def f():\n    pass\n", "does not say"),
    ):
        (own / f"{name}.py").write_text(text)
        with pytest.raises(UsageError, match=says):
            origins.of_module(str(own / f"{name}.py"), "*", [adapter])
