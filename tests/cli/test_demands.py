"""``--require`` and ``--baseline``: a session is held to them by run, resumed, in blocks, merged, and by a gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.common.commands import LAWS, TOY, run

COMMON = ("--adapter", TOY, "--laws", LAWS, "--world-size", "1-2", "--no-confirm", "--jobs", "1")
FEW, ALL = ("--law", "toy.completes"), ("--law", "toy.completes,toy.worlds")
BASELINE = "fsdpcheck-baseline.json"
TO_IT = ("--baseline", BASELINE)
LESS = f"{TOY}: toy.worlds: not among the chosen checks, or not reached"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline of two laws; reports of a session of both, of one of them, and of both in two shards."""
    folder = tmp_path_factory.mktemp("roads")
    assert run(folder, "gate", *COMMON, *ALL, "--update")[0] == 0
    assert run(folder, "run", *COMMON, *ALL, "--json", "all.json")[0] == 0
    assert run(folder, "run", *COMMON, *FEW, "--json", "few.json")[0] == 0
    for number in (1, 2):
        assert run(folder, "run", *COMMON, *ALL, "--shard", f"{number}/2", "--json", f"part{number}.json")[0] == 0
    return folder


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("run", *COMMON, *ALL, *TO_IT), 0),
        (("run", *COMMON, *FEW, *TO_IT), 2),
        (("run", *COMMON, *ALL, *TO_IT, "--json", "all.json", "--resume"), 0),
        (("run", *COMMON, *FEW, *TO_IT, "--json", "few.json", "--resume"), 2),
        (("run", *COMMON, *FEW, *TO_IT, "--json", "blocks.json", "--blocks", "2"), 2),
        (("merge", "part1.json", "part2.json", *TO_IT), 0),
        (("merge", "few.json", *TO_IT), 2),
    ],
)
def test_what_the_baseline_has_is_judged_or_it_is_red(words: tuple[str, ...], code: int, folder: Path) -> None:
    found, out, err = run(folder, *words)
    assert (found, f"ERROR: {LESS}" in out) == (code, code != 0), out + err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("run", *COMMON, *FEW, "--require", "toy.completes"), 0),
        (("run", *COMMON, *FEW, "--require", "toy.secret,toy.completes"), 2),
        (("run", *COMMON, *FEW, "--require", "training.plain"), 2),
        (("run", *COMMON, *FEW, "--require", "nothing.*"), 2),
        (("merge", "part1.json", "part2.json", "--require", "toy.worlds"), 0),
        (("merge", "part1.json", "part2.json", "--require", "training.plain"), 2),
        (("gate", *COMMON, *ALL, "--require", "toy.worlds"), 0),
        (("gate", *COMMON, *ALL, "--require", "training.plain"), 2),
    ],
)
def test_what_is_required_is_judged_or_it_is_red(words: tuple[str, ...], code: int, folder: Path) -> None:
    """A law that was not chosen too: to choose fewer laws is no way around it."""
    found, out, err = run(folder, *words)
    assert (found, "required is " in out) == (code, code != 0), out + err


@pytest.mark.parametrize("words", [("run",), ("gate", "--update")])
def test_what_no_law_matches_is_said_before_anything_is_judged(words: tuple[str, ...], tmp_path: Path) -> None:
    code, out, err = run(tmp_path, *words, "--adapter", TOY, "--require", "training.*,trianing.plain")
    assert (code, out) == (2, "")
    assert "required is 'trianing.plain', and no law that could be judged matches. Did you mean" in err
    assert [*tmp_path.iterdir()] == []


def test_what_no_law_matches_is_shown_with_its_line_before_anything_is_judged(tmp_path: Path) -> None:
    settings = f"[tool.fsdpcheck]\nadapter = [{TOY!r}]\nrequire = [\n  'training.*',\n  'trianing.plain',\n]\n"
    (tmp_path / "pyproject.toml").write_text(settings)
    code, out, err = run(tmp_path, "gate", "--update")
    assert (code, out, "\n  where   pyproject.toml:5\n" in err) == (2, "", True), err


def test_a_setting_requires_and_a_baseline_is_not_written_without_it(tmp_path: Path) -> None:
    """A promise that is dropped together with the baseline's line is red all the same."""
    settings = (
        f'[tool.fsdpcheck]\nadapter = [{TOY!r}]\nlaws = [{LAWS!r}]\nlaw = ["toy.completes"]\nrequire = ["toy.c*"]\n'
    )
    (tmp_path / "pyproject.toml").write_text(settings)
    words = ("gate", "--world-size", "1-2", "--no-confirm", "--jobs", "1", "--update")
    assert run(tmp_path, *words)[0] == 0
    (tmp_path / "pyproject.toml").write_text(settings.replace('"toy.c*"', '"toy.completes", "toy.worlds"'))
    kept = (tmp_path / BASELINE).read_text()
    code, out, _ = run(tmp_path, *words)
    assert (code, "required is 'toy.worlds', and no law that could be judged matches" in out) == (2, True)
    assert (tmp_path / BASELINE).read_text() == kept


def test_a_finding_is_worse_than_what_is_missing(folder: Path) -> None:
    code, out, _ = run(folder, "run", *COMMON, "--law", "toy.agrees", *TO_IT, "--json", "worse.json")
    less = f"{TOY}: toy.completes, toy.worlds: not among the chosen checks, or not reached"
    assert (code, f"ERROR: {less}" in out) == (1, True)
    told = json.loads((folder / "worse.json").read_text())
    assert any(less in text for text in map(str, told["errors"]))


def test_a_shard_is_held_to_nothing_and_a_file_that_is_no_baseline_is_named(folder: Path) -> None:
    part = ("run", *COMMON, *ALL, "--shard", "1/2", "--json", "part.json")
    for demand in (TO_IT, ("--require", "toy.*")):
        code, _, err = run(folder, *part, *demand)
        assert (code, "say --require and --baseline to `fsdpcheck merge`" in err) == (2, True)
    for words in (("run", *COMMON, *FEW), ("merge", "few.json")):
        code, out, err = run(folder, *words, "--baseline", "nowhere.json")
        assert (code, "there is no baseline in nowhere.json" in err, "hold" in out) == (2, True, False)
