"""`fsdpcheck run` and `replay` as users see them: verdicts, findings, replays, interrupts, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdpcheck import cli
from fsdpcheck.cli import launch
from fsdpcheck.errors import UsageError
from fsdpcheck.report import document
from fsdpcheck.session import journal as journals
from fsdpcheck.session import torchrun
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan
from tests.common.commands import LAWS, TOY, TOYS, environment, run, start


def test_a_glob_without_a_law_has_code_2(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "run", "--adapter", TOY, "--laws", LAWS, "--law", "zzz.*")
    assert code == 2
    assert "no law matches 'zzz.*'" in out


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str, dict[str, Any]]:
    """One session over laws that hold, break, crash the process, are not promised, and have a bug."""
    folder = tmp_path_factory.mktemp("session")
    laws = ["completes", "crashes", "small", "secret", "broken", "agrees"]
    chosen = [word for name in laws for word in ("--law", f"toy.{name}")]
    arguments = ["--world-size", "1-2", "--no-confirm", "--json", "out.json"]
    code, out, err = run(folder, "run", "--adapter", TOY, "--laws", LAWS, *chosen, *arguments)
    assert sorted(path.name for path in folder.iterdir()) == ["out.json"], err
    return code, out, err, json.loads((folder / "out.json").read_text())


def _verdict(session: tuple[int, str, str, dict[str, Any]], law: str) -> dict[str, Any]:
    return next(verdict for verdict in session[3]["verdicts"] if verdict["law"] == law)


def test_every_law_has_its_verdict(session: tuple[int, str, str, dict[str, Any]]) -> None:
    statuses = {verdict["law"]: verdict["status"] for verdict in session[3]["verdicts"]}
    assert statuses == {
        "toy.completes": "holds",
        "toy.crashes": "finding",
        "toy.small": "finding",
        "toy.secret": "not promised",
        "toy.broken": "error",
        "toy.agrees": "finding",
    }


def test_an_internal_error_is_worse_than_a_finding(session: tuple[int, str, str, dict[str, Any]]) -> None:
    code, out, _, data = session
    assert code == data["exit_code"] == 3
    assert "ZeroDivisionError: a bug of the law" in out


def test_a_law_that_is_not_promised_shows_the_reason_and_no_cases(
    session: tuple[int, str, str, dict[str, Any]],
) -> None:
    row = next(line for line in session[1].splitlines() if "toy.secret" in line)
    assert "not promised" in row
    assert "a toy has no secrets" in row
    assert _verdict(session, "toy.secret")["cases"] == 0


def test_a_crash_of_the_ranks_is_a_finding_that_names_its_case(session: tuple[int, str, str, dict[str, Any]]) -> None:
    finding = _verdict(session, "toy.crashes")["finding"]
    assert finding["got"] == "it was ended by SIGSEGV"
    assert finding["case"]["layout"]["batch_size"] > 3
    assert finding["token"] in session[1]


def test_a_finding_is_the_smallest_case_in_words(session: tuple[int, str, str, dict[str, Any]]) -> None:
    finding = _verdict(session, "toy.small")["finding"]
    assert (finding["got"], finding["case"]["layout"]["batch_size"]) == ("4", 4)
    assert finding["case"]["mesh"]["dp_shard"] == 1
    for text in (
        "No batch is larger than three samples.",
        "W = 1; a batch of 4 samples",
        "at most 3",
        "probably: its size",
    ):
        assert text in session[1]
    assert f"replay with: fsdpcheck replay '{finding['token']}' --adapter" in session[1]
    assert "confirmed on: not tried (--no-confirm)" in session[1]


def test_a_wrong_implementation_is_found(session: tuple[int, str, str, dict[str, Any]]) -> None:
    assert _verdict(session, "toy.agrees")["finding"]["case"]["mesh"]["dp_shard"] == 2


def test_output_without_a_terminal_has_no_colours(session: tuple[int, str, str, dict[str, Any]]) -> None:
    assert "\x1b" not in session[1] + session[2]


def test_a_report_is_replayed_finding_by_finding(
    session: tuple[int, str, str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = dict(session[3])
    data["verdicts"] = [verdict for verdict in data["verdicts"] if verdict["law"] in ("toy.small", "toy.agrees")]
    (tmp_path / "report.json").write_text(json.dumps(data))
    code = cli.main(["replay", str(tmp_path / "report.json"), "--adapter", TOY, "--laws", LAWS])
    out = capsys.readouterr().out
    assert code == 1
    assert "breaks toy.small" in out
    assert "breaks toy.agrees" in out


def test_a_document_that_cannot_be_written_loses_no_finding(
    session: tuple[int, str, str, dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    journal = journals.Journal(file, Plan(("reference",)))
    journal.note({"event": "verdict", **_verdict(session, "toy.small")})
    file.mkdir()
    with pytest.raises(UsageError, match=r"cannot be written: .*; the verdicts are in .*out.json.journal"):
        journal.close(document.document(Ledger(Plan(("reference",)))))
    assert _verdict(session, "toy.small")["finding"]["token"] in (tmp_path / "out.json.journal").read_text()


def test_a_finding_replayed_on_processes_says_so(
    session: tuple[int, str, str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    token = _verdict(session, "toy.agrees")["finding"]["token"]
    assert cli.main(["replay", token, "--adapter", TOY, "--laws", LAWS, "--engine", "processes"]) == 1
    assert "confirmed on: gloo x" in capsys.readouterr().out


def test_replaying_a_crash_is_a_finding_and_not_a_crash(
    session: tuple[int, str, str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    token = _verdict(session, "toy.crashes")["finding"]["token"]
    assert cli.main(["replay", token, "--adapter", TOY, "--laws", LAWS]) == 1
    assert "the process that ran the ranks died" in capsys.readouterr().out


def test_a_session_in_which_nothing_was_promised_is_no_pass(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "run", "--adapter", "fully_shard", "--law", "padding.zero")
    assert code == 2
    assert "nothing was checked" in out + err


def test_a_foreign_adapter_of_a_token_is_not_imported(
    session: tuple[int, str, str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    token = _verdict(session, "toy.small")["finding"]["token"]
    assert cli.main(["replay", token]) == 2
    assert "nothing was imported" in capsys.readouterr().err


def test_torchrun_hosts_a_session_on_its_own_ranks(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fsdpcheck"]
    laws = ["--law", "toy.completes,toy.secret,toy.worlds"]
    process = subprocess.run(
        [*launch, "run", "--adapter", TOY, "--laws", LAWS, *laws, "--json", "out.json"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "1 checks hold, 0 findings, 1 not promised, 1 not asked" in process.stdout
    assert "not asked: toy.worlds (on at most 2 ranks: its cases run on more as well)" in process.stdout
    assert process.stdout.count("1 checks hold") == 1
    verdicts = json.loads((tmp_path / "out.json").read_text())["verdicts"]
    assert [(verdict["status"], verdict["exit_code"]) for verdict in verdicts] == [
        ("holds", 0),
        ("not asked", 0),
        ("not promised", 0),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "one rank alone writes the report"
    assert "leaked" not in process.stderr, "of triton's, where what was imported is left frozen"


def test_without_a_command_it_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "fsdpcheck run --adapter reference" in capsys.readouterr().err


def test_ranks_of_torchrun_say_once_what_they_cannot_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of torchrun that another drives says nothing that this one says, and leaves with the same code."""
    told: list[int] = []
    monkeypatch.setattr(torchrun, "leave", told.append)
    monkeypatch.setattr(launch, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=0, SIG_IGN=0))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for rank, said in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        for words in (["run", "--no-such-option"], ["--no-such-option"]):
            with pytest.raises(SystemExit) as left:
                cli.main(words)
            assert left.value.code == 2
            assert bool(capsys.readouterr().err) == said
    assert told == [2, 2], "rank 0 tells the others"


def test_what_rank_0_ends_with_the_others_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(torchrun, "leave", told.append)
    monkeypatch.setattr(launch, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=0, SIG_IGN=0))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["run", "--resume"]) == 2
    assert cli.main(["list", "faults", "no_such*"]) == 2
    assert cli.main(["run", "--world-size", "3", "--adapter", TOY]) == 2
    assert "--world-size asks for more ranks than torchrun started" in capsys.readouterr().err
    assert told == [2, 2, 2]


def _interrupt(folder: Path, end: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str, str]:
    laws = ["--law", "toy.small", "--law", "toy.waits"]
    process = start(folder, "run", "--adapter", TOY, "--laws", LAWS, *laws, "--no-confirm", "--json", "out.json")
    assert process.stderr is not None
    line = process.stderr.readline()
    while "toy.small: finding" not in line:
        assert line, "the session ended before its first verdict"
        line = process.stderr.readline()
    end(process)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_an_interrupt_keeps_what_was_found(tmp_path: Path, number: signal.Signals) -> None:
    code, out, err = _interrupt(tmp_path, lambda process: process.send_signal(number))
    assert code == 130
    assert "interrupted: 0 checks hold, 1 finding of 1 root, 1 not reached" in out
    assert "Traceback" not in out + err
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["interrupted"]
    assert [verdict["status"] for verdict in data["verdicts"]] == ["finding"]


def _preflight(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fsdpcheck", *words]
    return subprocess.run(launch, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.mark.nightly  # minutes each; by day tests/report/test_preflight.py has the answers
@pytest.mark.parametrize(
    ("fault", "law", "said"),
    [
        ("empty_rank_skips_its_collectives", "collectives.plain", "NO           no rank waits for ever"),
        ("global_norm_of_own_shard", "global-norm.returned", "NO           gradients and norms are"),
        ("first_writer_alone_is_read", "state.resharded", "NO           a checkpoint comes back"),
        ("nothing_freed_after_a_step", "lifecycle.memory", "NO           memory is what sharding promises"),
    ],
)
def test_torchrun_without_a_command_answers_no_where_a_fault_is_planted(
    tmp_path: Path, fault: str, law: str, said: str
) -> None:
    asked = ["--adapter", "reference", "--law", law, "--install", fault, "--rank-files", "ranks"]
    process = _preflight(tmp_path, *asked)
    answers = process.stdout.rpartition("preflight:\n")[2]
    assert f"  {said}" in answers, process.stdout + process.stderr
    assert answers.count("  NO  ") == 1
    codes = [json.loads(path.read_text())["exit_code"] for path in sorted(tmp_path.glob("ranks/rank*.json"))]
    assert codes == [1, 1]


@pytest.mark.nightly  # a minute
def test_torchrun_without_a_command_answers_yes_of_what_is_sound(tmp_path: Path) -> None:
    process = _preflight(tmp_path, "--adapter", "reference_fsdp2")
    assert process.stdout.rpartition("preflight:\n")[2].count("  yes  ") == 4, process.stdout + process.stderr
    assert process.returncode == 0


@pytest.mark.nightly  # a minute
def test_torchrun_without_a_command_answers_of_a_users_own_parts(tmp_path: Path) -> None:
    parts = {
        "model": f"{TOYS}/own_parts.py:build", "batch": f"{TOYS}/own_parts.py:batch", "keeps": "units",
        "parallelize": f"{TOYS}/own_checkpoints.py:parallelize", "save": "save", "load": "load",
    }  # fmt: skip
    process = _preflight(tmp_path, *(word for name, value in parts.items() for word in (f"--{name}", value)))
    assert process.stdout.rpartition("preflight:\n")[2].count("  yes  ") == 4, process.stdout + process.stderr
    assert process.returncode == 0


def test_a_folder_that_cannot_be_written_ends_all_ranks_with_code_2(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_text("no folder")
    process = _preflight(tmp_path, "--rank-files", "ranks")
    assert process.stderr.count("--rank-files ranks: cannot be written") == 1
    assert process.stderr.count("exitcode  : 2") == 2, "both ranks"
    assert process.stdout == ""


def test_files_of_ranks_are_torchruns_alone(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "run", "--adapter", TOY, "--rank-files", "ranks")
    assert code == 2
    assert "--rank-files is about ranks of torchrun" in err
