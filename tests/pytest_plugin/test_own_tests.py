"""Laws in a user's own tests: a test for each, judged in another process, and counted as any other check."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import fsdpcheck
from fsdpcheck.errors import UsageError
from fsdpcheck.pytest_plugin import own_tests
from fsdpcheck.session.plan import Plan
from tests.common.commands import LAWS, TOY, TOYS, run_pytest

DOCS = Path(__file__).parents[2] / "docs"
SMALL: Any = {"laws_from": LAWS, "world_sizes": 1, "confirm": False}
FILE = f"""
import fsdpcheck
SMALL = {SMALL!r}

@fsdpcheck.parametrize_with_laws({TOY!r}, laws="toy.completes,toy.small,toy.secret", **SMALL)
def test_laws(law):
    law.check()
"""


def _pytest(where: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    common = ("-p", "fsdpcheck.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "-rA")
    code, out, err = run_pytest(where.path, [*common, *arguments])
    return pytest.RunResult(code, out.splitlines(), err.splitlines(), 0.0)


def test_each_promised_law_is_a_test_named_like_it(place: pytest.Pytester) -> None:
    """One holds, one breaks, and that which is not promised is no test; the file has JSON and JUnit what was judged."""
    place.makepyfile(test_mine=FILE)
    result = _pytest(place, "--fsdpcheck-json", "told.json", "--junit-xml", "junit.xml")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*FINDING 1: *breaks toy.small",
            "2 checks promised, 2 ran, * distinct cases (1 finding, 1 holds)",
            "PASSED test_mine.py::test_laws[[]toy.completes[]]",
            "FAILED test_mine.py::test_laws[[]toy.small[]]*",
        ]
    )
    data = json.loads((place.path / "told.json").read_text())
    assert {(one["law"], one["status"]) for one in data["verdicts"]} == {
        ("toy.completes", "holds"),
        ("toy.small", "finding"),
    }
    assert (data["exit_code"], set(data["versions"])) == (1, {"python", "torch", "hypothesis", "numpy"})
    junit = (place.path / "junit.xml").read_text()
    assert '<property name="fsdpcheck_law" value="toy.completes" />' in junit
    assert '<property name="fsdpcheck_status" value="finding" />' in junit


def test_a_law_that_a_test_does_not_check_fails_it(place: pytest.Pytester) -> None:
    """Green for nothing is what the account is there to see, and a name that -k chooses is a law's."""
    place.makepyfile(test_mine=FILE.replace("law.check()", "pass"))
    result = _pytest(place, "-k", "toy.completes")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(["toy.completes was not checked; next: call law.check() in the test", "only 0 of 1 *"])


TAKES_AWAY = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    gone = [item for item in items if "toy.small" in item.name]
    items[:] = [item for item in items if item not in gone]
"""


def test_a_law_that_a_hook_takes_away_is_red_and_one_that_it_deselects_is_counted(place: pytest.Pytester) -> None:
    """So is what happens in a worker of pytest-xdist, which collects by itself."""
    place.makepyfile(test_mine=FILE)
    place.makeconftest(TAKES_AWAY)
    result = _pytest(place)
    assert result.ret == 1
    gone = "1 tests of laws were taken away by a hook of conftest.py: test_mine.py::test_laws[[]toy.small[]]; next: *"
    result.stdout.fnmatch_lines([gone])
    common = ("-p", "fsdpcheck.pytest_plugin", "-p", "no:cacheprovider", "-n", "1")
    code, out, err = run_pytest(place.path, common)
    assert (code, "1 tests of laws were taken away by a hook" in out) == (1, True), out + err
    place.makeconftest(TAKES_AWAY + "    config.hook.pytest_deselected(items=gone)\n")
    result = _pytest(place)
    assert result.ret == 0
    result.assert_outcomes(passed=1, deselected=1)


def test_a_list_without_an_adapter_is_refused() -> None:
    """It would make a test that is skipped, and green."""
    with pytest.raises(UsageError, match="is given no adapter"):
        fsdpcheck.parametrize_with_laws([])


BROKEN = FILE.replace(",toy.small,toy.secret", ",toy.small")
SWALLOWED = BROKEN.replace("    law.check()", "    with contextlib.suppress(BaseException):\n        law.check()")
EXPECTED = BROKEN.replace("def test_laws", "@pytest.mark.xfail\ndef test_laws")


def test_a_law_that_breaks_in_a_test_that_passes_is_red(place: pytest.Pytester) -> None:
    """Who marks it as expected has written that down, and sees it; a baseline that says it holds is not met."""
    place.makepyfile(test_mine="import contextlib\n" + SWALLOWED)
    result = _pytest(place)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["toy.small on *unsharded.py:adapter does not hold, and its test passed; next: *"])
    skips = BROKEN.replace(
        "    law.check()", "    try:\n        law.check()\n    except BaseException:\n        pytest.skip()"
    )
    place.makepyfile(test_mine="import pytest\n" + skips)
    result = _pytest(place)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["toy.small on *unsharded.py:adapter does not hold, and its test was skipped; next: *"])
    place.makepyfile(test_mine="import pytest\n" + EXPECTED)
    result = _pytest(place)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["toy.small on * does not hold: test_mine.py::test_laws[[]toy.small[]]: xfail"])
    checks = [{"law": "toy.small", "adapter": TOY, "never": []}]
    base = {"schema": 1, "fsdpcheck": "0", "profile": "quick", "avoided": [], "accepted": {}, "ranks": {TOY: [1]}}
    (place.path / "base.json").write_text(json.dumps({**base, "checks": checks}))
    result = _pytest(place, "--fsdpcheck-baseline", "base.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*does not hold, as the baseline says, and its test is marked xfail; next: mend it, *"]
    )


def test_a_test_may_judge_another_adapter_that_breaks(place: pytest.Pytester) -> None:
    """What it promised is its own law on its own adapter."""
    breaks = (
        f"    with pytest.raises(fsdpcheck.LawsBroken):\n        fsdpcheck.check({TOY!r}, laws='toy.small', **SMALL)"
    )
    text = FILE.replace(",toy.small,toy.secret", "").replace("    law.check()", f"    law.check()\n{breaks}")
    place.makepyfile(test_mine="import pytest\n" + text)
    result = _pytest(place)
    result.assert_outcomes(passed=1)
    assert result.ret == 0


def test_the_adapter_of_a_test_file_is_judged_where_that_was_never_imported(place: pytest.Pytester) -> None:
    """The file plants a wrong answer for whoever judges in its process; the verdict is that of a session."""
    toy = (TOYS / "unsharded.py").read_text()
    spoils = "\nimport fsdpcheck.judging.check as judging\njudging.check_law = None\n"
    place.makepyfile(test_mine=toy + spoils + FILE.replace(f"({TOY!r}", "([Toy, adapter]"))
    result = _pytest(place, "-k", "toy.completes")
    result.assert_outcomes(passed=2, deselected=2)
    result.stdout.fnmatch_lines(["PASSED test_mine.py::test_laws[[]toy.completes-*test_mine.py:Toy[]]"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            ('laws="toy.completes,toy.small,toy.secret"', 'laws="toy.secret"'),
            "*promises none of the laws 'toy.secret'*",
        ),
        (('laws="toy.completes,toy.small,toy.secret"', 'laws="toy.complete"'), "*Did you mean 'toy.completes'?*"),
        ((repr(TOY), "'refrence'"), "*unknown adapter 'refrence'. Did you mean 'reference'?*"),
        (("def test_laws(law)", "def test_laws(x)"), "*test_laws does not take the law that it is to check*"),
    ],
)
def test_what_cannot_be_judged_is_an_error_when_tests_are_collected(
    place: pytest.Pytester, changed: tuple[str, str], said: str
) -> None:
    place.makepyfile(test_mine=FILE.replace(*changed))
    result = _pytest(place)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([said])


def test_what_is_required_and_not_promised_fails(place: pytest.Pytester) -> None:
    """By the decorator as a test of its own, and by an option for the session."""
    chosen = 'laws="toy.completes,toy.secret", require="toy.secret"'
    place.makepyfile(test_mine=FILE.replace('laws="toy.completes,toy.small,toy.secret"', chosen))
    result = _pytest(place, "--fsdpcheck-require", "training.plain")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "toy.secret is required, and not promised: no promise 'private': a toy has no secrets",
            "required is 'training.plain', and not judged on *: training.plain (not among the chosen checks*",
        ]
    )


def test_the_last_line_says_that_a_session_is_red_whose_tests_passed(place: pytest.Pytester) -> None:
    """Of several reasons the first one; a session that is green ends as pytest ends it."""
    place.makepyfile(test_mine=FILE.replace(",toy.small,toy.secret", ""))
    result = _pytest(place, "--fsdpcheck-require", "training.plain,training.steps")
    result.assert_outcomes(passed=1)
    why = "required is 'training.plain', and not judged on *"
    assert result.ret == 1
    result.stdout.fnmatch_lines(["=* 1 passed*", f"fsdpcheck: red, whatever the tests are: {why} (1 more above)"])
    assert result.outlines[-1].startswith("fsdpcheck: red")
    result = _pytest(place)
    assert (result.ret, " 1 passed" in result.outlines[-1]) == (0, True)


def test_a_baseline_counts_laws_in_ones_own_tests(place: pytest.Pytester) -> None:
    """As a gate does: what it has and this session lacks is a sentence, and red."""
    place.makepyfile(test_mine=FILE.replace(",toy.small,toy.secret", ""))
    base = {
        "schema": 1, "fsdpcheck": "0", "profile": "quick", "avoided": [], "accepted": {}, "ranks": {TOY: [1]},
        "checks": [{"law": law, "adapter": TOY, "never": []} for law in ("toy.completes", "toy.agrees")],
    }  # fmt: skip
    (place.path / "base.json").write_text(json.dumps(base))
    result = _pytest(place, "--fsdpcheck-baseline", "base.json")
    result.assert_outcomes(passed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*unsharded.py:adapter: toy.agrees: not among the chosen checks, or not reached"])
    (place.path / "base.json").write_text(json.dumps({**base, "checks": base["checks"][:1]}))  # type: ignore[index]
    assert _pytest(place, "--fsdpcheck-baseline", "base.json").ret == 0


def test_check_returns_what_holds_and_raises_with_the_report() -> None:
    heard: list[own_tests.Told] = []
    with own_tests.heard_by(heard.append):
        ledger = fsdpcheck.check(TOY, laws="toy.completes", **SMALL)
        with pytest.raises(fsdpcheck.LawsBroken, match=r"FINDING 1: .*breaks toy\.small[\s\S]*replay with") as broken:
            fsdpcheck.check(TOY, laws=["toy.completes", "toy.small"], **SMALL)
    assert [one.status for one in ledger.verdicts.values()] == ["holds"]
    assert len(broken.value.ledger.findings) == 1
    assert [(one.verdict.law, one.verdict.status) for one in heard] == [
        ("toy.completes", "holds"),
        ("toy.completes", "holds"),
        ("toy.small", "finding"),
    ]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"laws": "toy.secret"}, fsdpcheck.LawsBroken, "nothing was checked"),
        ({"laws": "toy.completes", "require": "toy.secret"}, fsdpcheck.LawsBroken, "required is 'toy.secret'"),
        ({"laws": "toy.zzz"}, UsageError, "no law matches 'toy.zzz'"),
        ({"profile": "hugue"}, UsageError, "there is no profile 'hugue'"),
        ({"world_sizes": "3-1"}, UsageError, "got 3-1"),
        ({"avoid": "tide"}, UsageError, "Did you mean 'tied'?"),
        ({"lews": "x"}, TypeError, "unexpected option 'lews'. Did you mean 'laws'?"),
    ],
)
def test_check_is_no_pass_where_nothing_was_judged(options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        fsdpcheck.check(TOY, **{**SMALL, **options})
    assert said in str(raised.value)


def test_an_adapter_is_named_by_its_place(tmp_path: Path) -> None:
    from tests.toys import unsharded

    file = str(Path(unsharded.__file__))
    assert own_tests.reference("ddp") == "ddp"
    assert own_tests.reference(unsharded.Toy) in (f"{file}:Toy", "tests.toys.unsharded:Toy")
    assert own_tests.reference(unsharded.adapter).endswith(":adapter")
    with pytest.raises(UsageError, match="which has no name at the top of its file"):
        own_tests.reference(unsharded.Toy())
    with pytest.raises(UsageError, match="which has no name at the top of its file"):
        own_tests.reference(type("Mine", (), {"__module__": "nowhere"}))


@pytest.mark.skipif(not DOCS.is_dir(), reason="only a checkout has the documents")
def test_the_tests_of_the_document_pass(place: pytest.Pytester) -> None:
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```", (DOCS / "own-tests.md").read_text(), re.M | re.S)
    assert [name for name, _ in blocks] == ["test_laws.py", "test_shards.py"]
    for name, block in blocks:
        (place.path / name).write_text(block)
    example = (DOCS / "examples" / "data_parallel.py").read_text()
    (place.path / "train.py").write_text(f"{example}\nMyAdapter = type(adapter)\n")
    result = _pytest(place, "-k", "training.plain or test_shards")
    assert result.parseoutcomes()["passed"] == 3, result.stdout.str()
    result.stdout.fnmatch_lines(["1 checks promised, 1 ran, *", "PASSED test_laws.py::test_laws[[]training.plain[]]"])


def test_what_is_not_said_is_as_the_options_say() -> None:
    asked = own_tests.Asked(("x",), {"profile": "ci"}, ())
    plan = asked.plan(Plan(("y",), profile="nightly", seed=3))
    assert (plan.adapters, plan.profile, plan.seed) == (("x",), "ci", 3)


def test_a_module_of_a_package_is_found_by_its_name_and_any_other_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, file in (("pack", tmp_path / "pack" / "__init__.py"), ("pack.mod", tmp_path / "pack" / "mod.py")):
        made: Any = types.ModuleType(name)
        made.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, made)
    assert own_tests._importable("pack.mod")
    assert not own_tests._importable("pack")
    monkeypatch.setattr(sys, "path", [])
    assert not own_tests._importable("pack.mod")
