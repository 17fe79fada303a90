"""The ledger itself: how rows are registered, chosen, judged and shown, apart from what any of them measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpcheck import cli
from fsdpcheck.errors import UsageError
from fsdpcheck.report import claims as report
from fsdpcheck.studies.claims import evaluation, registry
from fsdpcheck.studies.claims.lab import Lab, RanksFailed
from fsdpcheck.studies.claims.registry import Claim, Outcome, claim, only_if, verdict


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, Claim]:
    """An empty ledger, to be filled by the test."""
    empty: dict[str, Claim] = {}
    monkeypatch.setattr(registry, "ROWS", empty)
    monkeypatch.setattr(registry.pkgutil, "iter_modules", lambda path: [])
    return empty


def _measured(lab: Lab) -> Outcome:
    ranks = lab.ranks(lambda rank: rank, 3)
    return Outcome(verdict(ranks == [0, 1, 2]), f"ranks {ranks}")


def _raising(lab: Lab) -> Outcome:
    lab.ranks(lambda rank: 1 // rank, 2)
    raise AssertionError("not reached")


def test_a_claim_is_registered_once(rows: dict[str, Claim]) -> None:
    claim("A1", "a")(_measured)
    claim("A1", "a")(_measured)  # the module imported again
    with pytest.raises(RuntimeError, match="two checks are registered as claim A1: _measured and _raising"):
        claim("A1", "b")(_raising)


def test_rows_stand_in_the_order_of_the_ledger(rows: dict[str, Claim]) -> None:
    for id in ("B4'", "A10", "B4", "A2"):
        claim(id, id)(_measured)
    assert [row.id for row in registry.all_claims()] == ["A2", "A10", "B4", "B4'"]
    assert [row.id for row in registry.chosen(["B"])] == ["B4", "B4'"]
    assert [row.id for row in registry.chosen(["B4'", "A2"])] == ["A2", "B4'"]


def test_an_unknown_row_is_a_usage_error(rows: dict[str, Claim]) -> None:
    claim("A1", "a")(_measured)
    with pytest.raises(UsageError, match="there is no claim A7, Z; there are A1"):
        registry.chosen(["A7", "A1", "Z"])


def test_a_verdict_of_two_measurements() -> None:
    assert only_if("x", under_it=True, otherwise=True) == "holds"
    assert only_if("x", under_it=True, otherwise=False) == "holds only if x"
    assert only_if("x", under_it=False, otherwise=True) == "refuted"
    with pytest.raises(ValueError, match="got the verdict 'probably'"):
        Outcome("probably", "")


def test_a_check_that_raises_hides_no_other_row(rows: dict[str, Claim]) -> None:
    claim("A1", "raises")(_raising)
    claim("A2", "measures")(_measured)
    told: list[str] = []
    raised, measured = evaluation.judge(registry.all_claims(), lambda row: told.append(row.id))
    assert told == ["A1", "A2"]
    assert (raised.verdict, measured.verdict) == ("error", "holds")
    assert "RanksFailed: rank 0 raised ZeroDivisionError" in raised.measured
    assert "_raising" in raised.trace
    assert measured.measured == "ranks [0, 1, 2]"


def test_ranks_that_must_finish_and_hang_are_told_of() -> None:
    import torch.distributed as dist

    lab = Lab()
    try:
        with pytest.raises(RanksFailed, match="deadlock"):
            lab.ranks(lambda rank: dist.barrier() if rank else None, 2)
    finally:
        lab.close()


def test_the_command_prints_and_writes_the_table(
    rows: dict[str, Claim], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim("A1", "ranks are | numbered")(_measured)
    data, document = tmp_path / "claims.json", tmp_path / "claims.md"
    assert cli.main(["claims", "--json", str(data), "--markdown", str(document)]) == 0
    shown = capsys.readouterr()
    assert "ranks are | numbered" in shown.out
    assert "1 claims: 1 holds" in shown.out
    assert "claim A1" in shown.err
    row = {"id": "A1", "claim": "ranks are | numbered", "verdict": "holds", "measured": "ranks [0, 1, 2]"}
    assert json.loads(data.read_text()) == [row]
    assert "| A1 | ranks are \\| numbered | *holds* | ranks [0, 1, 2] |" in document.read_text()


def test_the_command_ends_with_3_when_a_check_raises(
    rows: dict[str, Claim], capsys: pytest.CaptureFixture[str]
) -> None:
    claim("A1", "raises")(_raising)
    assert cli.main(["claims", "A1"]) == 3
    shown = capsys.readouterr()
    assert "error" in shown.out
    assert "Traceback" in shown.err
    assert cli.main(["claims", "C9"]) == 2


def test_a_document_has_a_table_a_section() -> None:
    found = [evaluation.Row("A1", "a", "holds", "1"), evaluation.Row("C2", "c", "holds only if x", "2")]
    text = report.markdown(found)
    assert text.index("## A. Norm aggregation") < text.index("| A1 |") < text.index("## C. Deferred norms")
    assert "2 claims: 1 holds, 1 holds only if." in text
