"""Shards and blocks: what they judge is what one process judges, and what lacks of them is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.errors import INTERNAL, USAGE, UsageError
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.report.document import document
from fsdpcheck.report.merging import merged
from fsdpcheck.session import sharding
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan
from tests.common import sessions
from tests.common.commands import LAWS, TOY, run

CHOSEN = "toy.completes,toy.agrees,toy.small,toy.secret"
OTHER = TOY.replace(":adapter", ":Toy")
ARGUMENTS = (
    *(
        "run",
        "--adapter",
        TOY,
        "--adapter",
        OTHER,
        "--laws",
        LAWS,
        "--law",
        CHOSEN,
        "--world-size",
        "1-2",
        "--no-confirm",
    ),
    *("--jobs", "1", "--blocks", "2"),
)
OF_TIME = ("began", "sources", "origins", "digest")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the reports of two blocks in one process, and of the same in three shards."""
    folder = tmp_path_factory.mktemp("shards")
    assert run(folder, *ARGUMENTS, "--json", "whole.json")[0] == 1
    for number in (1, 2, 3):
        code, out, _ = run(folder, *ARGUMENTS, "--shard", f"{number}/3", "--json", f"part{number}.json")
        assert code in (0, 1), out
    return folder


def _told(ledger: Ledger) -> dict[str, Any]:
    """The document without what is of the clock, and without how many files it came of."""
    assert ledger.notes
    data = {name: value for name, value in document(ledger).items() if name not in OF_TIME}
    for verdict in data["verdicts"]:
        verdict["seconds"] = 0.0
    del data["notes"]
    return data


def test_all_shards_together_are_one_session_on_the_same_blocks_bit_for_bit(reports: Path) -> None:
    whole, parts = sorted(reports.glob("whole.seed*.json")), sorted(reports.glob("part*.json"))
    assert (len(whole), len(parts)) == (2, 6)
    assert _told(merged(whole)) == _told(merged(parts))
    assert sum(bool(json.loads(path.read_text())["verdicts"]) for path in parts) == 4
    verdicts = {one.law: one for one in merged(parts).verdicts.values() if one.adapter == OTHER}
    assert {law: one.status for law, one in verdicts.items()} == {
        "toy.completes": "holds",
        "toy.agrees": "finding",
        "toy.small": "finding",
        "toy.secret": "not promised",
    }
    single = json.loads(whole[0].read_text())["verdicts"]
    held = next(one for one in single if (one["law"], one["adapter"]) == ("toy.completes", OTHER))
    assert verdicts["toy.completes"].cases > held["cases"]


def test_the_command_reports_all_of_it_and_writes_it(reports: Path) -> None:
    names = sorted(path.name for path in reports.glob("part*.json"))
    code, out, _ = run(reports, "merge", *names, "--json", "all.json")
    assert code == 1
    assert "merged: 6 reports, 2 blocks of seeds 0-1" in out
    assert "FINDING 1" in out
    data = json.loads((reports / "all.json").read_text())
    assert (data["exit_code"], len(data["verdicts"])) == (1, 8)
    assert run(reports, "merge", *names, "all.json", "--json", "all.json")[0] == 1  # what it writes, it does not read


def test_merge_may_be_written_behind_report_unless_a_file_has_that_name(reports: Path, tmp_path: Path) -> None:
    parts = sorted(str(path) for path in reports.glob("part*.json"))
    assert run(tmp_path, "report", "merge", *parts) == run(tmp_path, "merge", *parts)
    (tmp_path / "merge").write_text("{}")
    code, _, err = run(tmp_path, "report", "merge", *parts)
    assert (code, "merge is no report of a session" in err) == (2, True)


def test_a_shard_that_is_missing_is_said_and_red(reports: Path) -> None:
    parts = sorted(reports.glob("part*.json"))
    left = [path for path in parts if path.name not in ("part2.seed1.json", "part3.seed1.json")]
    assert [text for text, _ in merged(left).errors] == ["of seed 1 2 shards of 3 missing: 2-3"]
    (green, *_) = [path for path in sorted(reports.glob("part*.seed0.json")) if not _breaks(path)]
    ledger = merged([green])
    assert ledger.exit_code == USAGE
    assert "of seed 1 3 shards of 3 missing: 1-3" in [text for text, _ in ledger.errors]


def _breaks(path: Path) -> bool:
    return any(one["status"] == "finding" for one in json.loads(path.read_text())["verdicts"])


def _changed(path: Path, folder: Path, change: Mapping[str, Any]) -> Path:
    """A copy with other content under a checksum that is right."""
    from fsdpcheck.session.journal import digest_of_document

    data = {**json.loads(path.read_text()), **change}
    copy = folder / path.name
    copy.write_text(json.dumps({**data, "digest": digest_of_document(data)}))
    return copy


def test_reports_of_other_sessions_code_or_content_are_refused(reports: Path, tmp_path: Path) -> None:
    first, second, *_ = (path for path in sorted(reports.glob("part*.json")) if _breaks(path))
    data = json.loads(second.read_text())
    (key, sources), *_ = data["sources"].items()
    name = next(path for path in sources["files"] if path.endswith("laws.py"))
    other = {key: {**sources, "files": {**sources["files"], name: "0" * 32}}}
    for change, said in (
        ({"plan": {**data["plan"], "profile": "ci"}}, "profile: 'ci', not 'quick'"),
        ({"plan": {**data["plan"], "shard": [2, 4]}}, "of 4 shards and 2 blocks, not of 3 shards and 2 blocks"),
        ({"plan": {**data["plan"], "seed": data["plan"]["seed"] + 9}}, "blocks from seed 9 on, not from 0"),
        ({"versions": {**data["versions"], "torch": "1.0"}}, "torch 1.0, not "),
        ({"fsdpcheck": "9"}, "fsdpcheck 9, not "),
        ({"sources": other}, "reports of different code are not merged: laws.py"),
    ):
        with pytest.raises(UsageError) as refused:
            merged([first, _changed(second, tmp_path, change)])
        assert said in str(refused.value)
    with pytest.raises(UsageError, match=r"was judged twice with seed 0[\s\S]*name each shard once"):
        merged([first, first])


def test_a_report_that_was_edited_is_refused(reports: Path, tmp_path: Path) -> None:
    path = next(path for path in reports.glob("part*.json") if _breaks(path))
    data = json.loads(path.read_text())
    for edited in (
        {**data, "verdicts": [{**one, "status": "holds", "finding": None, "exit_code": 0} for one in data["verdicts"]]},
        {**data, "plan": {**data["plan"], "seed": 5}},
        {"schema": 7},
    ):
        (tmp_path / "edited.json").write_text(json.dumps(edited))
        with pytest.raises(UsageError, match="is no report of a session"):
            merged([tmp_path / "edited.json"])


def test_what_a_gate_has_waived_stays_waived(tmp_path: Path) -> None:
    found = sessions.finding()
    ledger = sessions.ledger([Verdict(found.law, sessions.MINE, "finding", 3, finding=found, exit_code=1)])
    ledger.waived = {found.token: "the waiver"}
    (tmp_path / "gate.json").write_text(json.dumps(document(ledger)))
    told = merged([tmp_path / "gate.json"])
    assert (told.exit_code, told.waived) == (0, {found.token: "the waiver"})


def test_every_check_is_in_one_shard_and_laws_of_one_space_are_in_the_same() -> None:
    laws, spaces = [f"law{n}" for n in range(20)], {f"law{n}": f"space{n // 3}" for n in range(20)}
    pairs = {(law, ref) for law in laws for ref in ("x", "y")}
    for seed in (0, 5):
        own = [
            pairs - sharding.elsewhere(Plan(("x", "y"), seed=seed, shard=(number, 4)), laws, spaces)
            for number in range(1, 5)
        ]
        assert sum(map(len, own)) == len(pairs)
        assert set().union(*own) == pairs
        for mine in own:
            assert {spaces[law] for law, _ in mine} == {
                spaces[law] for law in laws if all((law, ref) in mine for ref in ("x",)) or (law, "y") in mine
            }
    assert sharding.elsewhere(Plan(("x",)), laws, spaces) == frozenset()


def test_a_shard_that_lacks_a_verdict_of_its_own_is_an_internal_error() -> None:
    ledger = Ledger(Plan(("x",), shard=(1, 2)))
    plan = {"event": "plan", "laws": ["a", "b"], "guarantees": {}, "versions": {}, "unaccepted": {}, "installs": []}
    ledger.take({**plan, "spaces": {"a": "a", "b": "b"}})
    assert (ledger.total, ledger.elsewhere) == (1, frozenset({("b", "x")}))
    ledger.take({"event": "end", "interrupted": False})
    assert ledger.exit_code == INTERNAL
