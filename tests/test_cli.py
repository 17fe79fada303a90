"""The command line: its options, its exit codes, what it says to bad input, and what survives a crash or Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

import pytest

import fsdpcheck
from fsdpcheck import adapters, cli, law
from fsdpcheck.case import Trait
from fsdpcheck.case.trait_words import MEANINGS
from fsdpcheck.errors import UsageError
from fsdpcheck.ledger import Ledger
from fsdpcheck.plan import Plan
from fsdpcheck.report import document

TOY = f"{Path(__file__).parent / 'toys' / 'laws.py'}:adapter"
_SOURCES = str(Path(fsdpcheck.__file__).parent.parent)

OPTIONS = {
    "run": {
        "--adapter", "--avoid", "--budget", "--engine", "--help", "--install", "--json", "--law", "--no-confirm",
        "--profile", "--seed", "--world-size", "-h", "--model", "--batch", "--loss", "--units", "--real",
    },
    "replay": {
        "--adapter", "--batch", "--budget", "--engine", "--help", "--install", "--loss", "--model", "-h", "TOKEN|FILE",
    },
    "power": {"--adapter", "--cases", "--family", "--help", "--json", "--world-size", "-h"},
    "claims": {"--help", "--json", "--markdown", "-h", "ID"},
    "list": {"--help", "-h", "what"},
}  # fmt: skip
"""Options only grow: take none away, for somebody's continuous integration names it."""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": _SOURCES, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fsdpcheck", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=_environment(), stdout=pipe, stderr=pipe, text=True)


def _run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = _start(folder, *arguments)
    out, err = process.communicate()
    return process.returncode, out, err


def _subcommands() -> dict[str, argparse.ArgumentParser]:
    actions = cli._parser()._actions
    return next(dict(action.choices) for action in actions if isinstance(action, argparse._SubParsersAction))


def test_the_options_are_frozen() -> None:
    found = {
        name: {text for action in parser._actions for text in action.option_strings or [action.metavar or action.dest]}
        for name, parser in _subcommands().items()
    }
    assert found == OPTIONS


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["replay", "--help"], ["list", "--help"], ["claims", "--help"]]
)
def test_help_ends_well_and_shows_an_example_or_the_codes(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(arguments)
    assert leaving.value.code == 0
    assert "fsdpcheck" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--world-size", "0"], "wanted 1 <= first <= last <= 64, got 0-0"),
        (["run", "--world-size", "3-1"], "got 3-1"),
        (["run", "--world-size", "two"], "wanted a number, a range or a list"),
        (["run", "--avoid", "tied,frosen"], "there is no trait 'frosen'; Did you mean 'frozen'? known: bias, "),
        (["run", "--engine", "proceses"], "argument --engine: invalid choice: 'proceses' (choose from simulated,"),
        (["run", "--engine", "proceses"], "Did you mean 'processes'?"),
        (["run", "--profile", "nigthly"], "Did you mean 'nightly'?"),
        (["list", "trait"], "Did you mean 'traits'?"),
        (["run", "--budget", "-1"], "wanted a number of seconds above 0"),
        (["run", "--profile", "thorough"], "invalid choice: 'thorough'"),
        (["run", "--engine", "quantum"], "invalid choice: 'quantum'"),
        (["list", "everything"], "invalid choice: 'everything'"),
        ([], "the following arguments are required"),
    ],
)
def test_usage_errors_have_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(arguments)
    assert leaving.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "v2:AAAA"], "cut short"),
        (["replay", "v9:AAAA"], "version 9"),
        (["replay", "no-such-file"], "wanted a token (v2:...) or a file that holds one, got 'no-such-file'"),
        (["run", "--json", "/no/such/folder/report.json"], "cannot be written"),
        (["run", "--json", os.curdir], "is a folder, wanted the name of a file"),
        (["replay", ""], "wanted a token (v2:...) or a file that holds one"),
    ],
)
def test_bad_names_and_files_have_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_bad_adapters_have_code_2(tmp_path: Path) -> None:
    code, out, _ = _run(tmp_path, "run", "--adapter", "refrence")
    assert code == 2
    assert "unknown adapter 'refrence'. Did you mean 'reference'?" in out


def test_every_option_says_what_it_is_and_its_default() -> None:
    for name, parser in _subcommands().items():
        for action in parser._actions:
            told = action.help or ""
            assert told, f"{name}: {action.option_strings or action.dest}"
            alone = action.nargs == 0 or (name, action.dest) == ("replay", "what")
            assert alone or "(default: " in told, f"{name}: {action.option_strings or action.dest}: {told}"


def test_traits_are_listed_with_what_they_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(MEANINGS) == set(get_args(Trait))
    assert cli.main(["list", "traits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", lines[0]) == ["trait", "what it is", "accepted by"]
    frozen = next(line for line in lines if line.startswith("frozen "))
    assert re.split("  +", frozen)[1] == "parameters that are not trained"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--law", "trainning.plain"], "no law matches 'trainning.plain'; Did you mean 'training.plain'? known: "),
        (["--install", "averaged_twise"], "unknown fault 'averaged_twise'. Did you mean 'averaged_twice'?"),
        (["--model", "{toys}:rihgt", "--batch", "{toys}:tokens"], "has no 'rihgt'. Did you mean 'right'?"),
    ],
)
def test_the_nearest_name_is_offered(tmp_path: Path, arguments: list[str], said: str) -> None:
    toys = str(Path(__file__).parent / "toys" / "own_models.py")
    code, out, _ = _run(tmp_path, "run", "--adapter", "reference", *(word.format(toys=toys) for word in arguments))
    assert code == 2
    assert said in out


@pytest.mark.parametrize(("worlds", "ragged"), [("1", True), ("2-3", False)])
def test_accepted_traits_that_no_case_demanded_are_said(tmp_path: Path, worlds: str, ragged: bool) -> None:
    arguments = ["--world-size", worlds, "--json", "out.json"]
    code, out, _ = _run(tmp_path, "run", "--adapter", TOY, "--law", "toy.completes", *arguments)
    (verdict,) = json.loads((tmp_path / "out.json").read_text())["verdicts"]
    said = next((line for line in out.splitlines() if "accepted, but in no case of these laws" in line), "")
    assert (code, "ragged" in verdict["undrawn"], "ragged" in said) == (0, ragged, ragged)
    accepted = {"ragged", "empty-rank", "rows<ranks", "uneven-rows", "root-parameters"}
    assert set(verdict["undrawn"]) == accepted - set(verdict["census"])


def test_a_promise_without_what_its_laws_judge_by_has_code_2(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fsdpcheck.adapter import Features\n"
        "class Mine:\n"
        "    name, features = 'mine', Features(promises=frozenset({'plain', 'padding.zero'}))\n"
        "    def build(self, model, setup): ...\n"
    )
    code, out, _ = _run(tmp_path, "run", "--adapter", "mine.py:Mine", "--law", "training.plain")
    assert code == 2
    assert "adapter 'mine.py:Mine' promises 'padding.zero' and does not show what its laws judge by" in out
    assert "wanted  shards as well" in out


def test_an_adapter_that_breaks_its_protocol_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fsdpcheck.adapter import Features\n"
        "class Mine:\n"
        "    name, features = 'mine', Features(promises=frozenset({'plain'}))\n"
        "    def build(self, model, setup): return object()\n"
    )
    code, out, _ = _run(
        tmp_path, "run", "--adapter", "mine.py:Mine", "--law", "invariance.w*", "--law", "training.plain"
    )
    assert code == 2
    assert out.count("lacks a method") == 1
    assert "not checked: the adapter broke its protocol in invariance.world" in out
    assert out.count("ERROR") == 1


def test_a_glob_without_a_law_has_code_2(tmp_path: Path) -> None:
    code, out, _ = _run(tmp_path, "run", "--adapter", TOY, "--law", "zzz.*")
    assert code == 2
    assert "no law matches 'zzz.*'" in out


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str, dict[str, Any]]:
    """One session over laws that hold, break, crash the process, are not promised, and have a bug."""
    folder = tmp_path_factory.mktemp("session")
    laws = ["completes", "crashes", "small", "secret", "broken", "agrees"]
    chosen = [word for name in laws for word in ("--law", f"toy.{name}")]
    arguments = ["--world-size", "1-2", "--no-confirm", "--json", "out.json"]
    code, out, err = _run(folder, "run", "--adapter", TOY, *chosen, *arguments)
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
    assert "confirmed on gloo: not tried (--no-confirm)" in session[1]


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
    code = cli.main(["replay", str(tmp_path / "report.json"), "--adapter", TOY])
    out = capsys.readouterr().out
    assert code == 1
    assert "breaks toy.small" in out
    assert "breaks toy.agrees" in out


def test_a_document_that_cannot_be_written_loses_no_finding(
    session: tuple[int, str, str, dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    journal = document.Journal(file)
    journal.note({"event": "verdict", **_verdict(session, "toy.small")})
    file.mkdir()
    with pytest.raises(UsageError, match=r"cannot be written: .*; the verdicts are in .*out.json.journal"):
        journal.close(Ledger(Plan(("reference",))))
    assert _verdict(session, "toy.small")["finding"]["token"] in (tmp_path / "out.json.journal").read_text()


def test_a_finding_replayed_on_processes_says_so(
    session: tuple[int, str, str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    token = _verdict(session, "toy.agrees")["finding"]["token"]
    assert cli.main(["replay", token, "--adapter", TOY, "--engine", "processes"]) == 1
    assert "confirmed on gloo: yes (run on processes)" in capsys.readouterr().out


def test_replaying_a_crash_is_a_finding_and_not_a_crash(
    session: tuple[int, str, str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    token = _verdict(session, "toy.crashes")["finding"]["token"]
    assert cli.main(["replay", token, "--adapter", TOY]) == 1
    assert "the process that ran the ranks died" in capsys.readouterr().out


def test_a_session_in_which_nothing_was_promised_is_no_pass(tmp_path: Path) -> None:
    code, out, err = _run(tmp_path, "run", "--adapter", "fully_shard", "--law", "padding.zero")
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
    laws = ["--law", "toy.completes", "--law", "toy.secret"]
    process = subprocess.run(
        [*launch, "run", "--adapter", TOY, *laws], cwd=tmp_path, env=_environment(), capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "1 checks hold, 0 findings, 1 not promised" in process.stdout
    assert process.stdout.count("1 checks hold") == 1


def _interrupt(folder: Path, end: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str, str]:
    laws = ["--law", "toy.small", "--law", "toy.waits"]
    process = _start(folder, "run", "--adapter", TOY, *laws, "--no-confirm", "--json", "out.json")
    assert process.stderr is not None
    line = process.stderr.readline()
    while "toy.small: finding" not in line:
        assert line, "the session ended before its first verdict"
        line = process.stderr.readline()
    end(process)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_found(tmp_path: Path, number: signal.Signals) -> None:
    code, out, err = _interrupt(tmp_path, lambda process: process.send_signal(number))
    assert code == 130
    assert "interrupted: 0 checks hold, 1 finding of 1 root, 1 not reached" in out
    assert "Traceback" not in out + err
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["interrupted"]
    assert [verdict["status"] for verdict in data["verdicts"]] == ["finding"]


def test_the_main_job_is_every_adapter_without_an_extra() -> None:
    assert adapters.default_names() == ("fsdp1", "fully_shard", "reference", "reference_fsdp2")


@pytest.mark.parametrize("what", ["adapters", "engines", "laws", "faults"])
def test_list_names_what_there_is(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", what]) == 0
    assert capsys.readouterr().out.strip()


def test_traits_to_avoid_are_in_no_case_and_in_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    avoided = ["--avoid", "ragged,empty-rank,micro-batches"]
    arguments = ["run", "--adapter", "reference", "--law", "training.plain", "--world-size", "2", "--json", str(report)]
    assert cli.main([*arguments, *avoided]) == 0
    data = json.loads(report.read_text())
    assert data["plan"]["avoid"] == ["ragged", "empty-rank", "micro-batches"]
    (verdict,) = data["verdicts"]
    assert verdict["cases"] > 0
    assert not {"ragged", "empty-rank", "micro-batches"} & verdict["census"].keys()


def test_traits_are_listed_with_who_accepts_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "traits"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "fully_shard" in lines["tied"]
    assert "fully_shard" not in lines["tied-private"]


def test_traits_that_an_extra_brings_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("opacus")
    assert cli.main(["list", "traits"]) == 0
    assert "opacus" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("padding_idx"))


@pytest.mark.parametrize(
    "text", [cli.RUN_EPILOG, (Path(__file__).parents[1] / "README.md").read_text()], ids=["help", "README"]
)
def test_chapters_that_examples_name_are_promised(text: str) -> None:
    shown = re.findall(r"fsdpcheck run --adapter (\w+) --law '([^']+)'", text)
    assert shown
    for name, glob in shown:
        features = adapters.load(name).features
        chosen = [found for law_name, found in law.chapters().items() if fnmatch(law_name, glob)]
        assert any(not found.not_promised(features) for found in chosen), (name, glob)
