"""`fsdpcheck report`, and the forms of a report beside a session: what is written where, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fsdpcheck import cli
from fsdpcheck.errors import UsageError
from fsdpcheck.report import document, progress, summary, table, writing
from fsdpcheck.report.chapters import labels
from fsdpcheck.report.colour import uncoloured
from fsdpcheck.session.ledger import Ledger
from tests.common import sessions
from tests.common.commands import LAWS, TOY, run

FORMS = {"--html": "page.html", "--junit": "junit.xml", "--sarif": "fsdpcheck.sarif", "--markdown": "summary.md"}


def keep(folder: Path, *ledgers: Ledger) -> list[str]:
    """Each session as a file of ``folder``, by its name."""
    for number, ledger in enumerate(ledgers):
        (folder / f"{number}.json").write_text(json.dumps(document.document(ledger)))
    return [f"{number}.json" for number in range(len(ledgers))]


def every(options: Sequence[str] = tuple(FORMS)) -> list[str]:
    return [word for option in options for word in (option, FORMS[option])]


def test_a_kept_session_is_told_again_in_every_form(tmp_path: Path) -> None:
    ledger = sessions.mixed()
    code, out, err = run(tmp_path, "report", *keep(tmp_path, ledger), *every(), "--github")
    assert (code, err) == (0, "")
    printed, _, annotations = out.partition("\n::error ")
    assert printed == summary.ending(ledger, uncoloured)
    assert annotations.count("\n::error ") == 3
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("tests") == "7"
    assert len(json.loads((tmp_path / "fsdpcheck.sarif").read_text())["runs"][0]["results"]) == 3
    assert "### 1. `train.py:MyAdapter` breaks" in (tmp_path / "summary.md").read_text()
    assert "Deadlock: no rank can move" in (tmp_path / "page.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["0.json", *FORMS.values()])


def test_of_several_sessions_the_newest_is_told_whatever_their_order(tmp_path: Path) -> None:
    newest, oldest = sessions.large(at="2026-11-21T08:00+00:00"), sessions.large(at="2026-11-19T08:00+00:00", broken=0)
    code, out, _ = run(tmp_path, "report", *keep(tmp_path, newest, oldest), "--html", "page.html")
    assert (code, out.rstrip("\n")) == (0, summary.ending(newest, uncoloured))
    page = (tmp_path / "page.html").read_text()
    assert "2 sessions, the oldest first" in page
    assert page.index("2026-11-19 08:00") < page.index("2026-11-21 08:00")


def test_a_session_writes_the_forms_that_a_kept_one_does(tmp_path: Path) -> None:
    laws = ["--law", "toy.completes,toy.small,toy.secret", "--world-size", "1-2", "--no-confirm"]
    arguments = ["--adapter", TOY, "--laws", LAWS, *laws, "--json", "out.json", *every(), "--github"]
    code, out, err = run(tmp_path, "run", *arguments)
    assert code == 1, err
    told = {name: (tmp_path / name).read_text() for name in FORMS.values()}
    assert run(tmp_path, "report", "out.json", *every(), "--github") == (0, out, "")
    assert {name: (tmp_path / name).read_text() for name in FORMS.values()} == told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--html", "no/page.html"], "there is no folder"),
        (["--sarif", "folder"], "it is a folder"),
        (["--html", "page.html", "--junit", "./page.html"], "--html and --junit name one file"),
        (["--power", "0.json"], "0.json is no measurement of power"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_is(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    code, out, err = run(tmp_path, "report", *keep(tmp_path, sessions.mixed()), *words)
    assert (code, out) == (2, "")
    assert said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "folder"]


def test_a_session_does_not_begin_where_its_report_could_not_be_written(tmp_path: Path) -> None:
    for words in (["--html", "no/page.html"], ["--json", "out.json", "--markdown", "out.json"]):
        code, out, err = run(tmp_path, "run", "--adapter", TOY, "--laws", LAWS, "--law", "toy.completes", *words)
        assert (code, out) == (2, "")
        assert "[1/1]" not in err
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_read_only_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """root may write everywhere: what the system says of a folder is put in its place."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UsageError, match="is read-only"):
        writing.require({"junit": tmp_path / "junit.xml"})


def test_a_form_that_fails_at_the_end_loses_neither_the_others_nor_the_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of a page is taken away while the session runs."""
    gone = tmp_path / "gone"
    gone.mkdir()
    arguments = ["--adapter", TOY, "--laws", LAWS, "--law", "toy.completes", "--world-size", "1", "--no-confirm"]
    begun = writing.require

    def then_taken_away(files: dict[str, Path]) -> None:
        begun(files)
        gone.rmdir()

    monkeypatch.setattr(writing, "require", then_taken_away)
    files = [
        "--html",
        str(gone / "page.html"),
        "--junit",
        str(tmp_path / "j.xml"),
        "--json",
        str(tmp_path / "out.json"),
    ]
    assert cli.main(["run", *arguments, *files]) == 2
    told = capsys.readouterr()
    assert "1 checks hold" in told.out
    assert "a report cannot be written" in told.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j.xml", "out.json"]


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["schema"]["const"] == document.SCHEMA


def test_a_page_without_jinja_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"a page needs jinja2(\n.*)*pip install 'fsdpcheck\[html\]'"):
        writing.require({"html": tmp_path / "page.html"})
    writing.require({"junit": tmp_path / "junit.xml"})


def test_a_session_is_quiet_by_default_and_names_each_law_when_asked() -> None:
    ledger = sessions.large()
    quiet, verbose = (summary.ending(ledger, uncoloured, verbose) for verbose in (False, True))
    rows = [line for line in quiet.splitlines() if line.startswith("chapter")]
    assert [line.split()[0] for line in rows] == ["chapter", *(f"chapter{number:02}" for number in range(17))]
    assert "1 finding, 5 hold" in rows[1]
    assert "not promised: 24 laws (-v names them, and says why)" in quiet
    assert "(no promise)" not in quiet
    assert sum(law in verbose for law in ledger.laws) == len(ledger.laws) == 119
    for text in (quiet, verbose):
        assert text.count("FINDING ") == 4
        assert text.splitlines()[-1] == table.summary(ledger)


def test_a_chapter_of_which_nothing_is_asked_has_no_line_and_what_is_wrong_has_one() -> None:
    lines = table.by_chapter(sessions.mixed(), lambda text, colour: f"{colour}({text})").splitlines()
    for begins in ("norms     1 holds", "red(state     1 error ", "red(training  2 findings ", "red(zero      1 not r"):
        assert any(line.startswith(begins) for line in lines), begins
    assert any(line.startswith("yellow(train.py:MyAdapter: not promised: norms.mixed (no promise") for line in lines)


def test_progress_says_at_first_how_much_there_is_to_judge(capsys: pytest.CaptureFixture[str]) -> None:
    """Promised checks of this shard alone."""
    whole = sessions.mixed()
    (ref,), vain = whole.plan.adapters, {law: "no promise" for law in whole.laws[:2]}
    event = {"event": "plan", "unpromised": {ref: vain}}
    for elsewhere in (frozenset(), frozenset({(whole.laws[0], ref), (whole.laws[2], ref)})):
        progress.progress()(Ledger(whole.plan, whole.laws, elsewhere=elsewhere), event)
    few, fewer = capsys.readouterr().err.splitlines()
    laws = len(whole.laws)
    assert few == f"{laws - 2} checks to judge, of {laws} laws on 1 adapter; the profile quick has 10 cases a law"
    assert fewer.startswith(f"{laws - 3} checks to judge")


def test_progress_is_a_line_a_chapter_and_what_is_no_pass_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in (False, True):
        whole, shown = sessions.mixed(), progress.progress(verbose=verbose)
        ledger = Ledger(whole.plan, whole.laws)
        for verdict in whole.verdicts.values():
            event = {"event": "verdict", **verdict.to_data()}
            ledger.take(event)
            shown(ledger, event)
        lines = [line.partition("] train.py:MyAdapter: ")[2] for line in capsys.readouterr().err.splitlines()]
        of_laws = [line for line in lines if line.partition(":")[0] in whole.laws]
        if verbose:
            asked = [one.law for one in whole.verdicts.values() if one.status not in ("not promised", "not asked")]
            assert [line.partition(":")[0] for line in lines] == asked
        else:
            assert [line.partition(":")[0] for line in of_laws] == [
                "state.saved",
                "training.plain",
                "training.gradients",
            ]
            assert [line for line in lines if line not in of_laws] == [
                "norms: 1 holds",
                "state: 1 error",
                "training: 2 findings",
            ]


def test_short_names_of_adapters_are_all_different() -> None:
    long = "/a/very/long/way/to/a/file.py:adapter"
    other = "/a/very/long/way/to/another/file.py:adapter"
    assert labels(["reference", long]) == {"reference": "reference", long: "file.py:adapter"}
    assert labels([long, other]) == {long: long, other: other}
    assert labels(["a.package.with.a.long.name.impl:Adapter"]) == {
        "a.package.with.a.long.name.impl:Adapter": "impl:Adapter"
    }
