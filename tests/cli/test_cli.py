"""The command line: its options, its exit codes, what it says to bad input, and what survives a crash or Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from fsdpcheck import adapters, cli
from fsdpcheck.adapters.vocabulary import PROMISES
from fsdpcheck.cli import run as run_command
from fsdpcheck.cli import sessions
from fsdpcheck.judging import registry
from fsdpcheck.report import listing
from tests.common.commands import run


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are as wide as they are in a pipe, whatever runs the tests (tox sets it)."""
    monkeypatch.delenv("COLUMNS", raising=False)


_SESSION = {
    "--adapter", "--avoid", "--budget", "--engine", "--help", "--install", "--jobs", "--json", "--law", "--laws",
    "--no-confirm", "-j", "--profile", "--seed", "--world-size", "-h", "--model", "--batch", "--loss",
    "--optimizer", "--units", "--real", "--parallelize", "--step", "--clip", "--mesh", "--averaging",
    "--roots", "--rank-files", "--html", "--junit", "--sarif", "--markdown", "--github", "--verbose", "-v",
    "--private", "--factor", "--shows", "--save", "--load", "--read", "--load-at", "--keeps",
    "--param-dtype", "--reduce-dtype", "--device", "--backend",
}  # fmt: skip
OPTIONS = {
    "run": {*_SESSION, "--resume", "--coverage", "--shard", "--blocks", "--require", "--baseline"},
    "preflight": _SESSION,
    "gate": {*_SESSION, "--baseline", "--require", "--update"},
    "report": {
        "--github", "--help", "--html", "--junit", "--markdown", "--power", "--sarif", "--schema", "--verbose", "-h",
        "-v", "FILE",
    },
    "merge": {"--baseline", "--help", "--json", "--require", "-h", "FILE"},
    "doctor": {"--adapter", "--help", "--json", "-h"},
    "init": {"--help", "--no-workflow", "-h", "KIND"},
    "replay": {
        "--adapter", "--batch", "--budget", "--engine", "--help", "--install", "--laws", "--loss", "--model",
        "--optimizer", "--script", "-h", "TOKEN|FILE", "--device", "--backend",
    },
    "compare": {
        "--budget", "--cuda-as-cpu", "--exact", "--false-alarm", "--help", "--jobs", "--json", "--own", "--per-node",
        "--ranks", "--script", "--seed", "-h", "-j", "'SCRIPT ...'",
    },
    "power": {"--adapter", "--cases", "--family", "--help", "--json", "--world-size", "-h"},
    "faults": {
        "--adapter", "--cases", "--equivalent", "--every", "--fault", "--file", "--from", "--help", "--html", "--json",
        "--keep", "--law", "--markdown", "--mutants", "--pairs", "--profile", "--seed", "--shard", "--world-size", "-h",
    },
    "simulate": {
        "--budget", "--cuda-as-cpu", "--dumps", "--help", "--json", "--order", "--own", "--per-node", "--ranks",
        "--schedule", "--schedules", "--shrink", "--torchrun", "--trace", "-h", "-m", "-n", "SCRIPT ...",
    },
    "cost": {
        "--between", "--cuda-as-cpu", "--help", "--json", "--per-node", "--ranks", "--rounds", "--within",
        "--without-values", "-h", "SCRIPT ...",
    },
    "trace check": {"--help", "--in-order", "--json", "-h", "PATH"},
    "trace show": {"--help", "--width", "-h", "FILE"},
    "claims": {"--help", "--json", "--markdown", "-h", "ID"},
    "completion": {"--help", "-h", "SHELL"},
    "list": {"--help", "-h", "what", "GLOBS"},
}  # fmt: skip
"""Options only grow: take none away, for somebody's continuous integration names it."""


def _subcommands() -> dict[str, argparse.ArgumentParser]:
    """The parsers of all commands; of one that has commands of its own, those."""
    found: dict[str, argparse.ArgumentParser] = {}
    pending = [("", cli._parser())]
    while pending:
        name, parser = pending.pop()
        own = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        pending += [(f"{name} {word}".strip(), one) for action in own for word, one in action.choices.items()]
        found |= {} if own else {name: parser}
    return found


def test_the_options_are_frozen() -> None:
    found = {
        name: {text for action in parser._actions for text in action.option_strings or [action.metavar or action.dest]}
        for name, parser in _subcommands().items()
    }
    assert found == OPTIONS


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["run", "--help"],
        ["preflight", "--help"],
        ["replay", "--help"],
        ["list", "--help"],
        ["report", "--help"],
        ["claims", "--help"],
        ["simulate", "--help"],
        ["compare", "--help"],
        ["cost", "--help"],
        ["doctor", "--help"],
        ["trace", "--help"],
        ["trace", "check", "--help"],
        ["trace", "show", "--help"],
    ],
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
        (["run", "--avoid", "tied,frosen"], "there is no trait 'frosen'. Did you mean 'frozen'?\n"),
        (["run", "--engine", "proceses"], "argument --engine: invalid choice: 'proceses' (choose from simulated,"),
        (["run", "--engine", "proceses"], "Did you mean 'processes'?"),
        (["run", "--profile", "nigthly"], "Did you mean 'nightly'?"),
        (["list", "trait"], "Did you mean 'traits'?"),
        (["run", "--shard", "3"], "shard '3': wanted NUMBER/HOW-MANY, such as 3/8"),
        (["run", "--shard", "9/8"], "got 9 of 8"),
        (["run", "--blocks", "0"], "wanted a number from 1 to 100000"),
        (["run", "--jobs", "0"], "wanted auto or a number from 1 to 1024"),
        (["run", "--budget", "-1"], "wanted a number of seconds above 0"),
        (["run", "--profile", "thorough"], "invalid choice: 'thorough'"),
        (["run", "--engine", "quantum"], "invalid choice: 'quantum'"),
        (["list", "everything"], "invalid choice: 'everything'"),
        (["--"], "the following arguments are required"),
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
        (["run", "--html", "/no/such/folder/page.html"], "--html /no/such/folder/page.html cannot be written"),
        (["gate", "--adapter", "ddp", "--update", "--junit", os.curdir], "it is a folder"),
        (["report"], "a report is missing; next: fsdpcheck report report.json"),
        (["report", "no-such-file"], "no-such-file is no report of a session"),
        (["run", "--shard", "1/2"], "a part of a session without a report says nothing of the whole"),
        (["merge", "no-such-file"], "no-such-file is no report of a session"),
        (["report", "merge", "no-such-file", "--json", "x.json"], "no-such-file is no report of a session"),
        (["run", "--resume"], "--resume goes on with the session of a file; next: name it with --json"),
        (["replay", ""], "wanted a token (v2:...) or a file that holds one"),
        (["list", "laws", "zzz.*"], "no law matches 'zzz.*'. Next: `fsdpcheck list laws` names all."),
        (["list", "laws", "norms.*,norms.mixt"], "no law matches 'norms.mixt'. Did you mean 'norms.mixed'?\n"),
        (["list", "laws", ""], ". Next: `fsdpcheck list laws` names all.\n"),
        (
            ["list", "traits", "ti*"],
            "got 'ti*' behind 'traits'; wanted GLOBS behind 'laws' alone; next: leave",
        ),
    ],
)
def test_bad_names_and_files_have_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_bad_adapters_have_code_2(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, "run", "--adapter", "refrence")
    assert code == 2
    assert "unknown adapter 'refrence'. Did you mean 'reference'?" in out


def test_an_adapter_is_judged_once_however_often_and_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of one name in different files are two."""
    monkeypatch.chdir(tmp_path)
    named = ("mine.py:x", "./mine.py:x", str(tmp_path / "mine.py:x"), "other.py:x", "ddp", "ddp")
    words = [word for name in named for word in ("--adapter", name)]
    assert sessions.plan_of(cli._parser().parse_args(["run", *words])).adapters == ("mine.py:x", "other.py:x", "ddp")


def test_every_option_says_what_it_is_and_its_default() -> None:
    for name, parser in _subcommands().items():
        for action in parser._actions:
            told = action.help or ""
            assert told, f"{name}: {action.option_strings or action.dest}"
            alone = action.nargs == 0 or (action.required and not action.option_strings)
            assert alone or "(default: " in told, f"{name}: {action.option_strings or action.dest}: {told}"


def test_traits_are_listed_with_what_they_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "traits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", lines[0]) == ["trait", "what it is", "needs", "accepted by"]
    frozen = next(line for line in lines if line.startswith("frozen "))
    assert re.split("  +", frozen)[1] == "parameters that are not trained"
    project = next(line for line in lines if line.startswith("project "))
    assert re.split("  +", project)[2] == "Observed.local_tensors"


def test_promises_are_listed_with_what_they_need_and_the_laws_that_rest_on_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["list", "promises"]) == 0
    head, *lines = (re.split("  +", line) for line in capsys.readouterr().out.splitlines())
    assert head == ["promise", "laws", "needs", "what the implementation guarantees"]
    assert [line[0] for line in lines] == list(PROMISES)
    needs = {name: asked for name, _, asked, _ in lines}
    assert needs["noise"] == "private, after_reduce, before_step"
    assert (needs["stored"], needs["lifecycle"]) == ("readable, Adapter.stored", "all moments")
    for name, laws, _, meaning in lines:
        resting = [law for law in registry.chapters().values() if name in {law.promise, *law.needs_promises}]
        assert laws == str(len(resting))
        assert resting, f"no law asks for {name}"
        assert meaning.endswith(".")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--law", "trainning.plain"], "no law matches 'trainning.plain'. Did you mean 'training.plain'?\n"),
        (["--law", "training.plain,"], "no law matches ''. Next: `fsdpcheck list laws` names all."),
        (["--law", "training"], "no law matches 'training'. Did you mean 'training.*'?\n"),
        (["--install", "averaged_twise"], "unknown fault 'averaged_twise'. Did you mean 'averaged_twice'?"),
        (["--model", "{toys}:rihgt", "--batch", "{toys}:tokens"], "has no 'rihgt'. Did you mean 'right'?"),
    ],
)
def test_the_nearest_name_is_offered(tmp_path: Path, arguments: list[str], said: str) -> None:
    toys = str(Path(__file__).parents[1] / "toys" / "own_models.py")
    code, out, _ = run(tmp_path, "run", "--adapter", "reference", *(word.format(toys=toys) for word in arguments))
    assert code == 2
    assert said in out


def test_a_promise_without_what_its_laws_judge_by_has_code_2(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fsdpcheck.adapter import Features\n"
        "class Mine:\n"
        "    name, features = 'mine', Features(promises=frozenset({'plain', 'padding.zero'}))\n"
        "    def build(self, model, setup): ...\n"
    )
    code, out, _ = run(tmp_path, "run", "--adapter", "mine.py:Mine", "--law", "training.plain")
    assert code == 2
    assert "adapter 'mine.py:Mine' promises 'padding.zero' and does not show what its laws judge by" in out
    assert "wanted  shards as well" in out


def test_an_adapter_that_breaks_its_protocol_is_told_once(tmp_path: Path) -> None:
    stepless = f"{Path(__file__).parents[1] / 'toys' / 'stepless.py'}:Stepless"
    code, out, _ = run(tmp_path, "run", "--adapter", stepless, "--law", "invariance.world, training.plain")
    assert code == 2
    assert out.count("lacks a method") == 1
    assert "not checked: the error of training.plain ends every case: invariance.world" in out
    assert out.count("ERROR") == 1


def test_the_main_job_is_every_adapter_without_an_extra() -> None:
    assert adapters.default_names() == ("fsdp1", "fully_shard", "reference", "reference_fsdp2")


@pytest.mark.parametrize("what", ["adapters", "engines", "laws", "faults", "promises", "traits"])
def test_list_names_what_there_is_and_fits_a_terminal(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Piped it is a line a row; on a terminal no line is longer than that, and nothing is left away."""
    assert cli.main(["list", what]) == 0
    whole = capsys.readouterr().out
    narrow = listing.text(what, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert sorted("".join(whole.split())) == sorted("".join(narrow.split()))
    assert whole.strip()


def test_whole_statements_fit_a_terminal_and_lose_nothing() -> None:
    """Whatever width their source has: paragraphs are filled anew, what is not seen and the source begin a line."""
    whole, narrow = listing.statements(("*",)), listing.statements(("*",), 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert whole.split() == narrow.split()
    for begin in ("  Not seen: ", "  Source: "):
        assert narrow.count(f"\n{begin}") == whole.count(f"\n{begin}") > 100


def test_columns_say_how_wide_a_list_is_where_it_is_piped_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    widths = {}
    for columns in ("", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        assert cli.main(["list", "laws"]) == 0
        widths[columns] = max(map(len, capsys.readouterr().out.splitlines()))
    assert widths["100"] <= 100 < widths[""]


def test_list_alone_names_all_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    whole, lines = capsys.readouterr().out, listing.overview(80).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    for name in (*adapters.names(), *PROMISES, "training.*"):
        assert name in whole


_ASKED = {
    "bash": "COMP_WORDS=({quoted}); COMP_CWORD={last}; _fsdpcheck; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
    "zsh": "COMP_WORDS=({quoted}); COMP_CWORD={last}; emulate ksh -c _fsdpcheck; printf '%s\\n' $COMPREPLY",
    "fish": "complete -C '{plain}'",
}
"""How a shell is asked for what it offers for the last of some words."""


@pytest.mark.parametrize("shell", _ASKED)
def test_a_shell_completes_commands_options_and_names(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    assert cli.main(["completion", shell]) == 0
    written = capsys.readouterr().out
    if shell == "zsh":
        written = f"autoload -U compinit && compinit -u -d '{tmp_path / 'dump'}'\n{written}"
    (tmp_path / "completion").write_text(written)

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        ask = _ASKED[shell].format(quoted=line, last=len(words) - 1, plain=" ".join(words))
        alone = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
        command = [shell, *alone, "-c", f"source '{tmp_path / 'completion'}'; {ask}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        names = (line.split("\t")[0] for line in done.stdout.splitlines())
        mine = words[-1] if shell == "zsh" else ""  # which leaves the rest out by itself, behind what is asked here
        return [name for name in names if name and name.startswith(mine)]

    assert completed("fsdpcheck", "re") == ["replay", "report"]
    assert completed("fsdpcheck", "run", "--law", "training.pl") == ["training.plain"]
    assert "norms.*" in completed("fsdpcheck", "run", "--law", "norms.")
    assert completed("fsdpcheck", "gate", "--adapter", "fully_sh")[0] == "fully_shard"
    assert sorted(completed("fsdpcheck", "run", "--engine", "")) == ["processes", "simulated"]
    assert "--world-size" in completed("fsdpcheck", "run", "--w")
    assert completed("fsdpcheck", "trace", "c") == ["check"]
    assert completed("fsdpcheck", "trace", "check", "--in") == ["--in-order"]
    assert completed("fsdpcheck", "list", "tr") == ["traits"]
    assert completed("fsdpcheck", "run", "--json", "zzz") == []


def test_variants_of_an_adapter_are_listed_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "adapters"]) == 0
    lines = capsys.readouterr().out.splitlines()
    own = next(place for place, line in enumerate(lines) if line.startswith("fully_shard "))
    assert lines[own + 1] == "  fully_shard:by_the_book: fully_shard, recovering as documented"
    listed = [line.split(": ")[0].strip() for line in lines if line.startswith("  ")]
    assert all(adapters.load(ref).features.promises for ref in listed)


def test_each_law_is_listed_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "laws"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["law", "promise", "guarantee"]
    for line, found in zip(lines, registry.chapters().values(), strict=True):
        assert line.startswith(f"{found.name} ")
        assert line.endswith(found.guarantee)


def test_laws_that_match_are_stated_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "laws", "norms.one-*, privacy.noise"]) == 0
    out = capsys.readouterr().out
    names = ["norms.one-axis", "norms.one-sided", "privacy.noise"]
    assert [line for line in out.splitlines() if line and not line.startswith(" ")] == names
    for name in names:
        for line in registry.chapters()[name].statement.strip().splitlines():
            assert f"  {line}".rstrip() in out.splitlines()
    one_axis, noise = out.split("\n\nnorms.one-sided")[0], out.split("\n\nprivacy.noise")[1]
    assert "\n  promises     partial-norms\n  observables  grads, norms\n" in one_axis
    assert "\n  traits       hsdp, replicated, replicated-shards\n  ranks        4 or more\n" in one_axis
    cases = "clipping: probe; contributions: partial, mixed; replicated: yes; adjusted: in replicas"
    assert f"\n  cases        ranks: 4; {cases}\n" in one_axis
    assert "\n  promises     noise\n" in noise
    assert "\n  traits       project\n  ranks        1 or more\n" in noise


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
    "text", [run_command.EPILOG, (Path(__file__).parents[2] / "README.md").read_text()], ids=["help", "README"]
)
def test_chapters_that_examples_name_are_promised(text: str) -> None:
    shown = re.findall(r"fsdpcheck run --adapter (\w+) --law '([^']+)'", text)
    assert shown
    for name, glob in shown:
        features = adapters.load(name).features
        chosen = [found for law_name, found in registry.chapters().items() if fnmatch(law_name, glob)]
        assert any(not found.not_promised(features) for found in chosen), (name, glob)
