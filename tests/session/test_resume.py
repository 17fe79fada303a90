"""run --resume: what an interrupted or killed session found out is taken over, and nothing of another session is."""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck import cli
from fsdpcheck.errors import UsageError
from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.loading import provenance
from fsdpcheck.loading.provenance import Sources
from fsdpcheck.report import document
from fsdpcheck.session import journal as journals
from fsdpcheck.session import supervisor
from fsdpcheck.session.ledger import Ledger, Origin
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.resume import Earlier, earlier
from tests.common.commands import LAWS, TOY, TOYS

CHOSEN = ("toy.completes", "toy.small", "toy.secret", "toy.broken")
PLAN = Plan((TOY,), CHOSEN, world_sizes=(1,), confirm=False, laws_from=(LAWS,))
HELD = Verdict("a.held", "x", "holds", cases=3)
BROKEN = Verdict("b.broken", "x", "error", reason="a bug", exit_code=3)
SHORT = Verdict("c.short", "x", "holds", cases=1, reason="the budget ran out")
OTHERS = Plan(("x",), ("*",))
VERSIONS = {"python": "3", "torch": "2"}
SOURCES = Sources("ours")
THEN = "2026-11-22T12:46+00:00"


def _told(file: Path, *verdicts: Verdict, plan: Plan = OTHERS, sources: Sources = SOURCES) -> journals.Journal:
    """A session that has told ``verdicts`` and was killed."""
    journal = journals.Journal(file, plan)
    names = [verdict.law for verdict in verdicts]
    about = {"laws": names, "guarantees": {}, "versions": VERSIONS, "installs": [], "unaccepted": {}, "at": THEN}
    journal.note({"event": "plan", **about})
    for verdict in verdicts:
        _note(journal, verdict, sources)
    journal.leave()
    return journal


def _note(journal: journals.Journal, verdict: Verdict, sources: Sources = SOURCES) -> None:
    origin = {"law": verdict.law, "adapter": verdict.adapter, "key": sources.key, "sources": sources.to_data()}
    journal.note({"event": "sources", **origin})
    journal.note({"event": "verdict", **verdict.to_data()})


def _ledger(*verdicts: Verdict, sources: Sources = SOURCES) -> Ledger:
    """A session that has ended."""
    pairs = {(verdict.law, verdict.adapter): verdict for verdict in verdicts}
    origins = dict.fromkeys(pairs, Origin(THEN, sources.key))
    return Ledger(OTHERS, (), THEN, VERSIONS, verdicts=pairs, origins=origins, sources={sources.key: sources.to_data()})


def _written(file: Path, ledger: Ledger) -> dict[str, Any]:
    file.write_text(json.dumps(document.document(ledger)))
    return dict(json.loads(file.read_text()))


def _run(plan: Plan, known: Earlier | None = None) -> tuple[Ledger, list[str]]:
    begun = []

    def listen(ledger: Ledger, event: Mapping[str, Any]) -> None:
        if event["event"] == "law":
            begun.append(event["law"])

    return supervisor.supervise(plan, listen, 1, known), begun


def test_a_session_goes_on_where_it_was_interrupted_and_judges_anew_what_changed(tmp_path: Path) -> None:
    """The implementation is a file that imports one beside it, and another when it is asked for a case."""
    file, mine = tmp_path / "out.json", tmp_path / "mine.py"
    late = 'return __import__("late") and Unsharded('
    mine.write_text((TOYS / "unsharded.py").read_text().replace("return Unsharded(", late) + "\nimport beside\n")
    for name in ("beside.py", "late.py"):
        (tmp_path / name).write_text("one = 1\n")
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))  # long before the session, and not in the tick of the clock in which it begins
    ref = f"{mine}:adapter"
    plan = replace(PLAN, adapters=(ref,))
    whole, begun = _run(plan)
    assert begun == list(PLAN.laws)
    kept = {pair: verdict for pair, verdict in whole.verdicts.items() if pair[0] in ("toy.small", "toy.secret")}
    _written(file, replace(whole, verdicts=kept, interrupted=True))
    known = earlier(file, plan)
    again, begun = _run(plan, known)
    assert begun == ["toy.completes", "toy.broken"]
    assert list(again.verdicts) == list(whole.verdicts)
    assert again.verdicts["toy.small", ref] == whole.verdicts["toy.small", ref]
    assert (again.exit_code, again.interrupted) == (whole.exit_code, False)
    then = whole.began[:16].replace("T", " ")
    assert again.notes == (f"2 verdicts taken over from {then}, 2 found out now",)
    now = Sources(provenance.own(), {}, {})
    for name in ("mine.py", "beside.py", "late.py"):
        path = tmp_path / name
        before = path.read_text()
        path.write_text(before + "# edited\n")
        expected = ([], f"no verdict taken over, 2 judged anew: {name} changed")
        assert known.taken_over(now, [one.pair for one in known.known]) == expected
        path.write_text(before)
    assert len(known.taken_over(now, [one.pair for one in known.known])[0]) == 2


def test_what_changed_is_named_and_everything_else_stands(tmp_path: Path) -> None:
    mine, other = (str(tmp_path / name) for name in ("mine.py", "other.py"))
    for path in (mine, other):
        Path(path).write_text("one = 1\n")
    own, version = provenance.own(), provenance.build("torch")
    here = {mine: provenance.content(mine)}
    both = {**here, other: provenance.content(other)}
    sources = Sources(own, here, {"torch": version})
    assert sources.changed(Sources(own, here)) == ""
    assert sources.changed(Sources("another", here)) == "fsdpcheck itself changed"
    assert sources.changed(Sources(own, both)) == "other.py is new"
    assert version.startswith(f"{provenance.installed()['torch']} (")
    assert Sources(own, both, {"torch": "1"}).changed(Sources(own, here)) == f"torch 1 became {version}"
    assert Sources(own, {}, {"no_such": "1"}).changed(Sources(own)) == "no_such is gone"
    Path(other).unlink()
    assert Sources(own, both).changed(Sources(own, here)) == "other.py is gone"
    verdicts = [replace(HELD, law=f"{number}.held") for number in range(3)]
    file = tmp_path / "out.json"
    ledger, lasting = _ledger(*verdicts, sources=Sources(own, both)), Sources(own, here)
    ledger.sources[lasting.key] = lasting.to_data()
    ledger.origins["0.held", "x"] = Origin("2026-11-21T08:00+00:00", lasting.key)
    _written(file, ledger)
    stand, words = earlier(file, OTHERS).taken_over(Sources(own, here), [("new", "x"), *ledger.verdicts])
    assert [(known.verdict, known.at) for known in stand] == [(verdicts[0], "2026-11-21T08:00+00:00")]
    assert words == "1 verdict taken over from 2026-11-21 08:00, 1 found out now, 2 judged anew: other.py is gone"


def test_a_file_that_may_have_been_written_after_its_import_is_like_no_other(tmp_path: Path) -> None:
    """The content that was judged is not known then."""
    loaded = provenance.Loaded()
    later = tmp_path / "written_later.py"
    later.write_text("one = 1\n")
    os.utime(later, (2**32, 2**32))
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        __import__("written_later")
        sources = loaded.sources()
    assert str(later) in sources.files
    assert "written_later.py was written while" in sources.changed(sources)


def test_files_of_an_installed_implementation_count_by_their_content() -> None:
    """Of any other installed package its build counts."""
    import networkx

    file = os.path.realpath(str(networkx.__file__))
    plain, of_it = provenance.Loaded().sources(), provenance.Loaded(["networkx.algorithms:adapter"]).sources()
    assert plain.packages["networkx"] == provenance.build("networkx")
    assert plain.packages["networkx"].startswith(f"{networkx.__version__} (")
    assert file not in plain.files
    assert of_it.files[file] == provenance.content(file)
    assert not [path for path in plain.files if f"{os.sep}fsdpcheck{os.sep}" in path]
    assert __file__ in plain.files


@pytest.fixture
def stacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of packages of another environment, as a .pth file adds it, in which ``stacked`` is installed."""
    site = tmp_path / "site-packages"
    info = site / "stacked-1.2.dist-info"
    info.mkdir(parents=True)
    (site / "stacked.py").write_text("one = 1\n")
    (info / "RECORD").write_text("stacked.py,sha256=abc,8\nstacked-1.2.dist-info/RECORD,,\n")
    os.utime(site / "stacked.py", (1, 1))
    os.utime(info / "RECORD", (2, 2))
    monkeypatch.syspath_prepend(str(site))
    _look_again()
    yield site
    sys.modules.pop("stacked", None)
    monkeypatch.undo()
    _look_again()


def _look_again() -> None:
    for cache in (provenance.sites, provenance._distributions, provenance.installed, provenance.build):
        cache.cache_clear()


def test_packages_of_an_environment_below_this_one_count_by_their_build(stacked: Path) -> None:
    """torch's 2,000 files would be read for each process."""
    loaded = provenance.Loaded()
    importlib.import_module("stacked")
    assert loaded.packages()["stacked"] == "1.2"
    assert not any("stacked" in path for path in loaded.files())
    assert loaded.sources().packages["stacked"] == provenance.build("stacked")


def test_code_of_an_installed_package_that_was_edited_or_built_anew_is_another_build(stacked: Path) -> None:
    """The version says nothing of it."""
    info, before = stacked / "stacked-1.2.dist-info", provenance.build("stacked")
    (info / "INSTALLER").write_text("another")
    _look_again()
    assert provenance.build("stacked") == before
    told = Sources("own", {}, {"stacked": before})
    (stacked / "stacked.py").write_text("one = 2\n")  # after the installer wrote RECORD
    _look_again()
    edited = provenance.build("stacked")
    assert told.changed(Sources("own")) == f"stacked {before} became {edited}"
    os.utime(stacked / "stacked.py", (1, 1))
    (info / "RECORD").write_text("stacked.py,sha256=def,8\n")
    os.utime(info / "RECORD", (2, 2))
    _look_again()
    assert len({before, edited, provenance.build("stacked")}) == 3
    (info / "RECORD").unlink()
    _look_again()
    assert provenance.build("stacked") == "1.2"
    assert provenance.build("none_of_it") == provenance.GONE


def test_only_what_stands_is_taken_over(tmp_path: Path) -> None:
    _told(tmp_path / "out.json", HELD, BROKEN, SHORT, replace(HELD, law="d.empty", cases=0))
    assert earlier(tmp_path / "out.json", OTHERS).verdicts == (HELD,)


def test_a_killed_sessions_journal_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    _told(file, HELD, replace(HELD, law="d.cut"))
    path = journals.journal_of(file)
    path.write_text(path.read_text()[:-20])
    assert earlier(file, OTHERS).verdicts == (HELD,)
    journal = journals.Journal(file, OTHERS, goes_on=True)
    _note(journal, replace(HELD, law="e.next"))
    journal.leave()
    assert [verdict.law for verdict in earlier(file, OTHERS).verdicts] == ["a.held", "e.next"]


def test_a_document_counts_beside_the_journal_of_who_went_on_and_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    _told(file, HELD).close(document.document(_ledger(HELD)))
    _told(file, replace(HELD, law="e.next"))
    assert [verdict.law for verdict in earlier(file, OTHERS).verdicts] == ["a.held", "e.next"]


def test_without_a_file_all_is_to_be_done(tmp_path: Path) -> None:
    assert earlier(tmp_path / "out.json", OTHERS).verdicts == ()


@pytest.mark.parametrize(
    ("change", "plan", "said"),
    [
        ({}, replace(OTHERS, seed=7), "another plan: its seed: 0, asked: 7; next: leave --resume out"),
        ({"fsdpcheck": "9.0"}, OTHERS, "is of fsdpcheck 9.0, this is"),
    ],
)
def test_another_session_is_refused(tmp_path: Path, change: dict[str, str], plan: Plan, said: str) -> None:
    file = tmp_path / "out.json"
    data = {**_written(file, _ledger(HELD)), **change}
    file.write_text(json.dumps({**data, "digest": journals.digest_of_document(data)}))
    with pytest.raises(UsageError, match=said):
        earlier(file, plan)


def test_a_report_edited_by_hand_is_refused_and_the_law_named(tmp_path: Path) -> None:
    """In the document and in the journal; deleting a verdict's origin only means that it is judged anew."""
    file = tmp_path / "out.json"
    broken = replace(BROKEN, status="finding", reason="", cases=2)
    written = _written(file, _ledger(broken, HELD))
    edits = {"status": "holds", "cases": 0, "exit_code": 0, "reason": "none", "seconds": 1.0, "census": {"W=1": 1}}
    for name, value in edits.items():
        data = json.loads(json.dumps(written))
        data["verdicts"][0][name] = value
        file.write_text(json.dumps(data))
        with pytest.raises(UsageError, match=r"the verdict of b.broken on x was edited.*; next: leave --resume out"):
            earlier(file, OTHERS)
    for name in ("versions", "plan", "sources"):
        file.write_text(json.dumps({**written, name: {}}))
        with pytest.raises(UsageError, match=r"what all verdicts share \(plan, versions, sources\) was edited"):
            earlier(file, OTHERS)
    file.write_text(json.dumps({**written, "origins": written["origins"][1:]}))
    assert earlier(file, OTHERS).verdicts == (HELD,)
    file.unlink()
    _told(file, HELD)
    journal = journals.journal_of(file)
    journal.write_text(journal.read_text().replace('"cases": 3', '"cases": 4'))
    with pytest.raises(UsageError, match=r"the verdict of a.held on x was edited: its checksum is of other content"):
        earlier(file, OTHERS)


def test_a_report_of_before_there_were_sources_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    keys = ("began", "sources", "origins", "digest")
    old = {name: value for name, value in _written(file, _ledger(HELD)).items() if name not in keys}
    file.write_text(json.dumps(old))
    said = "does not say with which files its verdicts were found out.*; next: leave --resume out"
    with pytest.raises(UsageError, match=said):
        earlier(file, OTHERS)
    file.unlink()
    journals.journal_of(file).write_text('{"event": "began", "fsdpcheck": "0.1.0", "plan": {}}\n')
    with pytest.raises(UsageError, match=said):
        earlier(file, OTHERS)


def _hostile(written: str) -> list[bytes]:
    """What could lie where a report is looked for: texts that are none, and a report with each part of it replaced."""
    deep = "[" * 100_000 + "]" * 100_000
    texts = ["", "{}", "[]", "null", "7", '"text"', "no session", deep, '{"a":' * 100_000, "9" * 10_000, "NaN", "\x00"]
    values = [None, [], {}, "", "\x1b[31m", -1, 10**400, 1e999, float("nan"), [[]], {"law": {}}, True, deep]
    draw = random.Random(0)
    data = json.loads(written)
    for path in _paths(data):
        for value in draw.sample(values, 4):
            changed = json.loads(written)
            place = changed
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = value
            texts += [json.dumps(changed), json.dumps(_resealed(changed))]
    texts += [written[: draw.randrange(len(written))] for _ in range(20)]
    return [b"\xff\xfe\x00", b"\x80" * 99, *(text.encode("utf-8", "surrogatepass") for text in texts)]


def _paths(data: Any) -> list[tuple[Any, ...]]:
    if isinstance(data, dict | list):
        items = data.items() if isinstance(data, dict) else enumerate(data)
        return [path for key, value in items for path in [(key,), *((key, *rest) for rest in _paths(value))]]
    return []


def _resealed(data: dict[str, Any]) -> dict[str, Any]:
    """As somebody writes it who computes the checksums anew."""
    try:
        for verdict, origin in zip(data["verdicts"], data["origins"], strict=True):
            origin["digest"] = journals.digest_of_verdict(verdict, origin["at"], origin["sources"])
        return {**data, "digest": journals.digest_of_document(data)}
    except (KeyError, TypeError, AttributeError, ValueError):
        return data


def test_whatever_lies_there_is_taken_or_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    texts = {name.name: name.name for name in fields(Finding) if name.type == "str"}
    finding = Finding(**{**texts, "case": {"seed": 0}})
    _written(file, _ledger(HELD, replace(HELD, law="f.found", status="finding", finding=finding)))
    refused = []
    for hostile in _hostile(file.read_text()):
        file.write_bytes(hostile)
        try:
            earlier(file, OTHERS).taken_over(SOURCES, [("a.held", "x")])
        except UsageError as error:
            refused.append(str(error))
    assert len(refused) > 300
    assert [text for text in refused if len(text.splitlines()) > 1 or len(text) > 1000] == []
    file.unlink()
    os.mkfifo(file)
    for path in (file, tmp_path, Path("/dev/zero")):
        with pytest.raises(UsageError, match="cannot be read as a session: it is no regular file"):
            earlier(path, OTHERS)


@pytest.mark.nightly
def test_verdicts_of_another_torch_are_refused_and_stay_in_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    arguments = [
        "run",
        "--adapter",
        TOY,
        "--laws",
        LAWS,
        "--law",
        "toy.completes",
        "--world-size",
        "1",
        "--json",
        str(file),
    ]
    assert cli.main(arguments) == 0
    data = json.loads(file.read_text())
    other = {**data, "versions": {**data["versions"], "torch": "1.0"}}
    file.write_text(json.dumps({**other, "digest": journals.digest_of_document(other)}))
    then = file.read_text()
    assert cli.main([*arguments, "--resume"]) == 2
    assert f"the verdicts in {file} are of torch 1.0, now {data['versions']['torch']}" in capsys.readouterr().err
    assert file.read_text() == then
