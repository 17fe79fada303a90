"""`fsdpcheck gate`: settings in pyproject.toml and the environment, and what a session lacks of its baseline."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.findings.tokens import Token, encode
from fsdpcheck.report import colour
from tests.common.commands import LAWS, TOY, run

SETTINGS = f"""[project]
name = "toy"

[tool.fsdpcheck]
adapter = [{TOY!r}]
laws = [{LAWS!r}]
law = ["toy.completes", "toy.agree*"]
world-size = "1-2"
no-confirm = true
jobs = 1
"""
BASELINE = "fsdpcheck-baseline.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(SETTINGS.replace(', "toy.agree*"', ""))
    return tmp_path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The baseline of the toy."""
    folder = tmp_path_factory.mktemp("baseline")
    (folder / "pyproject.toml").write_text(SETTINGS.replace(', "toy.agree*"', ""))
    code, out, err = run(folder, "gate", "--update")
    assert code == 0, out + err
    assert f"{BASELINE}: 1 checks; commit it" in out
    return (folder / BASELINE).read_text()


def put(folder: Path, kept: str, **changes: Any) -> None:
    (folder / BASELINE).write_text(json.dumps(json.loads(kept) | changes))


def test_a_gate_without_a_baseline_is_red_and_says_how_to_make_one(folder: Path) -> None:
    code, out, err = run(folder, "gate")
    assert (code, "holds" in out) == (2, False)
    assert f"there is no baseline in {BASELINE}" in err
    assert "fsdpcheck gate --update" in err


def test_a_gate_that_is_told_nothing_judges_nothing(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "gate")
    assert (code, out) == (2, "")
    assert "nothing says what this gate judges" in err
    assert "no pyproject.toml here" in err


def test_laws_that_the_baseline_has_not_are_red(folder: Path, kept: str) -> None:
    """Such a file runs where everything is judged: nobody adds one unseen."""
    put(folder, kept)
    (folder / "more.py").write_text("import torch\n\ntorch.equal = lambda one, other: True\n")
    code, out, err = run(folder, "gate", "--laws", LAWS, "--laws", "more.py")
    assert (code, "laws of more.py, which the baseline has not" in out) == (2, True), out + err


def test_an_update_says_what_it_takes_out(folder: Path, kept: str) -> None:
    whole = json.loads(kept)
    put(folder, kept, checks=[*whole["checks"], {**CHECK, "law": "toy.gone"}], ranks={TOY: [1, 2, 3]})
    code, out, err = run(folder, "gate", "--update")
    assert code == 0, out + err
    assert f"{BASELINE} asks for less than before: {TOY} was judged on no case of 3 ranks" in err
    assert "toy.gone: not among the chosen checks" in err


def test_a_gate_that_judges_all_of_its_baseline_is_green(folder: Path, kept: str) -> None:
    put(folder, kept)
    code, out, err = run(folder, "gate")
    assert code == 0, out + err
    assert out.endswith(f"gate: all 1 checks of {BASELINE} hold\n")


def test_checks_that_the_baseline_lacks_are_named_behind_a_green_verdict(
    folder: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A law that a new release has: nobody is held to it until the baseline has it too."""
    put(folder, kept)
    monkeypatch.setattr(colour, "painter", lambda stream: lambda text, tint: f"{tint}({text})")
    code, out, err = run(folder, "gate", "--law", "toy.completes,toy.worlds")
    assert code == 0, out + err
    lacks = f"gate: 1 check that the baseline lacks, and does not hold anybody to: {TOY}: toy.worlds"
    assert out.splitlines()[-2:] == [
        f"green(gate: all 1 checks of {BASELINE} hold)",
        f"yellow({lacks}; next: fsdpcheck gate --update, and commit it)",
    ]


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        (["--world-size", "1"], {}, "was judged on no case of 2 ranks"),
        (["--avoid", "bias"], {}, "avoided, and not so in the baseline: bias"),
        ([], {"profile": "ci"}, "the profile is quick, the baseline's is ci: fewer cases a law"),
        ([], {"accepted": {TOY: ["bias"]}}, f"{TOY} no longer accepts bias"),
        (
            [],
            {"checks": [{"law": name, "adapter": TOY, "never": []} for name in ("toy.completes", "toy.agrees")]},
            f"{TOY}: toy.agrees: not among the chosen checks, or not reached",
        ),
        (
            ["--law", "toy.completes,toy.secret"],
            {"checks": [{"law": name, "adapter": TOY, "never": []} for name in ("toy.completes", "toy.secret")]},
            f"{TOY}: toy.secret: not promised: ",
        ),
    ],
)
def test_what_is_judged_no_more_is_red(
    words: list[str], changes: dict[str, Any], said: str, folder: Path, kept: str
) -> None:
    put(folder, kept, **changes)
    code, out, _ = run(folder, "gate", *words)
    assert code == 2
    assert f"ERROR: gate: {said}" in out or f" {said}" in out
    assert "ERROR: gate: next: judge it again, or write what is judged now with --update" in out


def test_what_a_gate_adds_is_an_annotation_too(folder: Path, kept: str) -> None:
    """What is missing is an error of the session, which held: every form tells it, and GitHub."""
    put(folder, kept, profile="ci")
    code, out, _ = run(folder, "gate", "--github")
    said = "the profile is quick, the baseline's is ci: fewer cases a law"
    assert code == 2
    assert [line for line in out.splitlines() if said in line] == [
        f"ERROR: gate: {said}",
        f"::error title=fsdpcheck::gate: {said}",
    ]


def test_a_finding_is_worse_than_what_is_missing(folder: Path, kept: str) -> None:
    put(folder, kept)
    code, out, _ = run(folder, "gate", "--law", "toy.agrees")
    assert code == 1
    assert "ERROR: gate: " in out


def test_a_baseline_is_not_made_of_what_breaks(folder: Path, kept: str) -> None:
    put(folder, kept)
    before = (folder / BASELINE).read_text()
    code, _, err = run(folder, "gate", "--update", "--law", "toy.agrees")
    assert (code, (folder / BASELINE).read_text()) == (1, before)
    assert f"{BASELINE} is as it was: not all of this session holds" in err


LESS = {"schema": 1, "profile": "quick", "avoided": [], "accepted": {}, "ranks": {}, "checks": []}
CHECK = {"law": "toy.completes", "adapter": TOY, "never": []}
EMPTY = (json.dumps(LESS), json.dumps(LESS | {"checks": [CHECK], "profile": "none"}))
"""A baseline of no checks, and one of an unknown profile: neither may hold."""


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 7}', '{"schema": 1, "checks": 3}', *EMPTY])
def test_a_file_that_is_no_baseline_is_named(text: str, folder: Path) -> None:
    (folder / BASELINE).write_text(text)
    code, _, err = run(folder, "gate")
    assert code == 2
    assert f"there is no baseline in {BASELINE}" in err


def test_a_baseline_that_cannot_be_written_is_named(folder: Path) -> None:
    code, _, err = run(folder, "gate", "--update", "--baseline", "no/folder.json")
    assert code == 2
    assert "the baseline no/folder.json cannot be written" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('profil = "ci"', "unknown setting 'profil'. Did you mean 'profile'?\n  where "),
        ('profile = "cii"', "a setting is wrong: profile = 'cii'"),
        ("profile = true", "profile has a wrong value"),
        ("real = 1", "real is on or off"),
        ("seed = [[1]]", "seed has a wrong value"),
        ('seed = "many"', "a setting is wrong: seed = 'many'"),
        ("update = true", "unknown setting 'update'."),
        ("zzz = true", "unknown setting 'zzz'."),
    ],
)
def test_a_wrong_setting_is_told_with_its_line(line: str, said: str, folder: Path) -> None:
    with (folder / "pyproject.toml").open("a") as file:
        file.write(line + "\n")
    code, _, err = run(folder, "gate")
    assert code == 2
    assert said in err
    assert "where   pyproject.toml:11" in err


@pytest.mark.parametrize(
    ("old", "new", "variable", "said"),
    [
        ('"toy.completes"', '"toy.complets"', {}, ". Did you mean 'toy.completes'?\n  where   pyproject.toml:7\n"),
        ("law = [", 'law = [\n  "toy.completes",\n  "tyo.*, toy.agrees",\n', {}, "\n  where   pyproject.toml:9\n"),
        ("no-", "require = ['toy.*', 'tyo.*']\nno-", {}, ". Did you mean 'toy.*'?\n  where   pyproject.toml:9\n"),
        ("jobs", "jobs", {"FSDPCHECK_LAW": "tyo.*"}, ". Did you mean 'toy.*'?\n  where   FSDPCHECK_LAW\n"),
        ("jobs", "jobs", {"FSDPCHECK_REQUIRE": "tyo.*"}, ". Did you mean 'toy.*'?\n  where   FSDPCHECK_REQUIRE\n"),
    ],
)
def test_a_law_that_nobody_knows_is_shown_with_its_line(
    old: str,
    new: str,
    variable: dict[str, str],
    said: str,
    folder: Path,
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And with the name that was meant, not with those of all laws."""
    put(folder, kept)
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    settings = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(settings.replace(old, new))
    code, out, err = run(folder, "gate", "--json", "out.json")
    assert (code, said in out) == (2, True), out + err
    assert "training.plain" not in out, "the names of all laws"
    assert said.strip() in "".join(error["text"] for error in json.loads((folder / "out.json").read_text())["errors"])


def test_a_law_that_nobody_knows_has_no_line_where_the_command_line_names_it(folder: Path, kept: str) -> None:
    put(folder, kept)
    code, out, _ = run(folder, "gate", "--law", "toy.complets")
    assert (code, "no law matches 'toy.complets'. Did you mean 'toy.completes'?" in out, "where" in out) == (
        2,
        True,
        False,
    )


def test_broken_toml_is_told_with_its_line(folder: Path) -> None:
    (folder / "pyproject.toml").write_text("[tool.fsdpcheck]\nadapter = [,]\n")
    code, _, err = run(folder, "gate")
    assert code == 2
    assert "pyproject.toml is no TOML" in err
    assert "line 2" in err


def test_the_command_line_is_over_the_environment_and_that_over_the_file(
    folder: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, kept)
    monkeypatch.setenv("FSDPCHECK_LAW", "toy.nobody")
    code, out, err = run(folder, "gate")
    assert (code, "no law matches 'toy.nobody'" in out + err) == (2, True)
    code, _, _ = run(folder, "gate", "--law", "toy.completes")
    assert code == 0
    monkeypatch.setenv("FSDPCHECK_LAW", "toy.completes")
    monkeypatch.setenv("FSDPCHECK_SEED", "few")
    code, _, err = run(folder, "gate")
    assert (code, "where   FSDPCHECK_SEED" in err) == (2, True)


def test_other_commands_read_no_settings(folder: Path) -> None:
    (folder / "pyproject.toml").write_text("[tool.fsdpcheck]\nadapter = [\n")
    code, _, err = run(folder, "list", "traits")
    assert (code, err) == (0, "")


def test_a_waived_finding_is_shown_and_green_until_its_day(folder: Path, kept: str) -> None:
    put(folder, kept, checks=[{**CHECK, "law": law} for law in ("toy.completes", "toy.agrees")])
    words = ("--law", "toy.completes", "--law", "toy.agrees", "--json", "out.json")
    assert run(folder, "gate", *words)[0] == 1
    verdicts = json.loads((folder / "out.json").read_text())["verdicts"]
    token = next(verdict["finding"]["token"] for verdict in verdicts if verdict["law"] == "toy.agrees")
    waiver = f"""[[tool.fsdpcheck.waiver]]
law = "toy.agrees"
adapter = {TOY!r}
reason = "known"
owner = "me"
expires = 9999-01-01
token = "{token}"
"""
    settings = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(settings + waiver)
    code, out, err = run(folder, "gate", *words)
    assert (code, "the witness of a waiver is not said to fail in any way" in out) == (1, True), out + err
    waiver += re.search(r"write (root = .*)", out).group(1) + "\n"  # type: ignore[union-attr]
    (folder / "pyproject.toml").write_text(settings + waiver)
    code, out, err = run(folder, "gate", *words)
    assert code == 0, out + err
    assert f"WAIVED: 1 finding: toy.agrees on {TOY}, until 9999-01-01: known (me)" in out
    assert f"gate: 1 of 2 checks of {BASELINE} hold, the others are waived" in out
    other = re.sub("root = .*", 'root = "value: something else"', waiver)
    (folder / "pyproject.toml").write_text(settings + other)
    code, out, err = run(folder, "gate", *words)
    assert (code, "the witness of a waiver fails otherwise now" in out) == (1, True), out + err
    (folder / "pyproject.toml").write_text(settings + waiver)
    code, out, err = run(folder, "gate", *words, "--update")  # what is waived must go on being judged
    assert code == 0, out + err
    assert {check["law"] for check in json.loads((folder / BASELINE).read_text())["checks"]} == {
        "toy.completes", "toy.agrees",
    }  # fmt: skip
    (folder / "pyproject.toml").write_text(settings + waiver.replace("9999", "2020"))
    code, out, err = run(folder, "gate", *words)
    assert (code, "ERROR: gate: a waiver has expired: toy.agrees" in out) == (1, True), out + err


def test_a_witness_that_cannot_be_replayed_is_red_in_every_file(folder: Path, kept: str) -> None:
    """Of a law that is gone, say; and what the baseline lacks is told all the same."""
    put(folder, kept, profile="ci")
    token = encode(
        Token("toy.gone", TOY, TrainingCase(ModelSpec((LayerSpec(1),)), MeshSpec(1), BatchLayout(batch_size=1)))
    )
    words = {"law": "toy.gone", "adapter": TOY, "reason": "known", "owner": "me", "token": token}
    waiver = "\n".join(f"{name} = {value!r}" for name, value in words.items())
    settings = (folder / "pyproject.toml").read_text()
    text = f"{settings}[[tool.fsdpcheck.waiver]]\n{waiver}\nexpires = 9999-01-01\n"
    (folder / "pyproject.toml").write_text(text)
    code, _, err = run(folder, "gate", "--json", "out.json", "--junit", "out.xml")
    assert (code, "toy.gone" in err) == (2, True), err
    data = json.loads((folder / "out.json").read_text())
    assert data["exit_code"] == 2
    assert any("the baseline's is ci" in error["text"] for error in data["errors"])
    assert any("toy.gone" in error["text"] for error in data["errors"])
    assert "<error " in (folder / "out.xml").read_text()


def test_no_environment_makes_a_gate_write_its_own_baseline(
    folder: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, kept, profile="ci")
    before = (folder / BASELINE).read_text()
    monkeypatch.setenv("FSDPCHECK_UPDATE", "1")
    assert run(folder, "gate")[0] == 2
    assert (folder / BASELINE).read_text() == before
