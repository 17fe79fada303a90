"""The pytest plugin: laws as tests, skips with reasons, and an account that fails a session of too few checks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from fsdpcheck import pytest_plugin
from fsdpcheck.findings.verdict import Status, Verdict
from fsdpcheck.judging.registry import chapters
from fsdpcheck.processes import leftovers
from fsdpcheck.pytest_plugin import outcome
from fsdpcheck.pytest_plugin.account import Account, Accountant
from fsdpcheck.session.plan import Plan
from tests.common.commands import LAWS, TOY, TOYS, run_pytest

CHAPTER = f"""
from fsdpcheck.judging.registry import _test, chapters
LAWS = chapters([{LAWS!r}])

test_completes = _test(LAWS["toy.completes"])
test_small = _test(LAWS["toy.small"])
test_secret = _test(LAWS["toy.secret"])
"""


@pytest.fixture
def chapter(place: pytest.Pytester) -> pytest.Pytester:
    """A folder with one chapter of toy laws: one holds, one breaks, one is not promised."""
    place.makepyfile(test_chapter=CHAPTER)
    return place


def _pytest(where: pytest.Pytester, *arguments: str, program: bool = False) -> pytest.RunResult:
    """A session in a process of its own; the plugin by its name, as conftest.py and the entry point have it.

    With xdist it is a program, which starts others. Without ``program`` it is forked, bears a mark (leftovers.py), and
    so ends nothing of what it has left: whoever gave the mark does.
    """
    common = ("-p", "fsdpcheck.pytest_plugin", "-p", "no:cacheprovider", "--fsdpcheck-world-size", "1")
    if program or "-n" in arguments:
        return where.runpytest_subprocess(*common, *arguments)
    code, out, err = run_pytest(where.path, [*common, *arguments])
    return pytest.RunResult(code, out.splitlines(), err.splitlines(), 0.0)


@pytest.mark.parametrize(
    "parallel",
    [("-p", "no:xdist"), *(pytest.param(("-n", many), marks=pytest.mark.nightly) for many in ("1", "2"))],
)
def test_laws_are_tests_and_are_accounted_for(chapter: pytest.Pytester, parallel: tuple[str, ...]) -> None:
    result = _pytest(chapter, *parallel, "--fsdpcheck-adapter", TOY, "-rs")
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "*FINDING 1: *breaks toy.small",
            "*replay with: fsdpcheck replay 'v2:*",
            "2 checks promised, 2 ran, * distinct cases (1 finding, 1 holds, 1 not promised)",
            "*SKIPPED*not promised: no promise 'private': a toy has no secrets*",
        ]
    )


def _told(status: Status, law: str = "a.law", **more: Any) -> dict[str, Any]:
    """What a test tells of one check."""
    verdict = Verdict(law, "x", status, 1, **more).to_data()
    return {"verdict": verdict, "profile": "quick", "avoid": [], "unaccepted": ["tied"], "versions": {"torch": "2"}}


def test_too_few_cases_fail_and_are_no_check_that_ran() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"TOO FEW CASES: a\.law on x\n  judged 1 of 15"):
        outcome.conclude(Verdict("a.law", "x", "too few cases", 1, reason="judged 1 of 15", exit_code=3))
    account = Account(Plan(()))
    account.promised = {"one": ("a.law", "x"), "two": ("b.law", "x")}
    account.add("one", _told("too few cases"))
    account.add("two", _told("holds", "b.law", never=("several ranks",)))
    assert (account.verdicts.total(), account.ran, account.missing) == (2, 1, [("a.law", "x")])
    assert "x: never judged: several ranks, in b.law" in account.lines(Plan(()))


def test_each_process_promises_all_and_what_was_promised_is_counted_once() -> None:
    account = Account(Plan(()))
    accountant = Accountant(account)
    for promised in ({"one": ["a.law", "x"], "two": ["a.law", "y"]}, {"one": ["a.law", "x"]}, {}):
        accountant.pytest_testnodedown(SimpleNamespace(workeroutput={"fsdpcheck_promised": promised}), None)
    accountant.pytest_testnodedown(SimpleNamespace(), None)  # it died before it said anything
    assert account.promised == {"one": ("a.law", "x"), "two": ("a.law", "y")}


def test_of_two_verdicts_on_one_check_the_one_that_is_no_pass_stands() -> None:
    for order in (("holds", "error"), ("error", "holds")):
        account = Account(Plan((), profile="ci"))
        for number, status in enumerate(order):
            account.add(str(number), _told(status, exit_code=3 * (status == "error")))
        assert account.ledger.verdicts["a.law", "x"].status == "error"
        assert (account.ledger.plan.profile, account.promises, account.ran) == ("quick", 2, 2)


def test_laws_of_one_space_stand_one_after_the_other_and_all_else_stays() -> None:
    """Of each adapter for itself: they share the cases that were drawn for it, and its executions."""

    def item(name: str, adapter: str) -> Any:
        return SimpleNamespace(name=name, obj=SimpleNamespace(law=chapters()[name]), callspec=called(adapter))

    def called(adapter: str) -> SimpleNamespace:
        return SimpleNamespace(params={"run": adapter})

    other = SimpleNamespace(name="other", obj=len)
    plain, beside, alike = "training.plain", "noise.scale", "training.gradients"
    keys = [chapters()[name].space.drawn.key for name in (plain, beside, alike)]
    assert keys[0] == keys[2] != keys[1]
    items = [item(plain, "x"), item(beside, "x"), other, item(alike, "y"), item(alike, "x")]
    config: Any = SimpleNamespace(stash={pytest_plugin._PLAN: Plan(())})
    pytest_plugin.pytest_collection_modifyitems(config, items)
    assert [one.name for one in items] == [plain, alike, "other", beside, alike]
    assert items[1].callspec.params["run"] == "x"


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", [("-p", "no:xdist"), pytest.param(("-n", "2"), marks=pytest.mark.nightly)])
def test_the_summary_says_on_what_verdicts_are_conditional(chapter: pytest.Pytester, parallel: tuple[str, ...]) -> None:
    said = "privacy.* is judged for given lists of records*no amplification by sampling is claimed of them"
    if parallel != ("-n", "2"):
        result = _pytest(chapter, *parallel, "--fsdpcheck-adapter", TOY, "-k", "completes")
        result.stdout.no_fnmatch_line(said)
    private = "\ntest_private = _test(replace(LAWS['toy.completes'], name='privacy.toy'))\n"
    chapter.makepyfile(test_chapter=f"from dataclasses import replace\n{CHAPTER}{private}")
    result = _pytest(chapter, *parallel, "--fsdpcheck-adapter", TOY, "-k", "private or completes")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["2 checks promised, 2 ran, *", said])


@pytest.mark.parametrize("parallel", [("-p", "no:xdist"), pytest.param(("-n", "2"), marks=pytest.mark.nightly)])
def test_a_session_in_which_nothing_was_promised_is_no_pass(
    chapter: pytest.Pytester, parallel: tuple[str, ...]
) -> None:
    result = _pytest(chapter, *parallel, "--fsdpcheck-adapter", TOY, "-k", "secret")
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["nothing was checked: none of these laws is promised by an adapter that was named*"])


def test_each_adapter_is_a_test(chapter: pytest.Pytester) -> None:
    result = _pytest(
        chapter, "-p", "no:xdist", "--fsdpcheck-adapter", TOY, "--fsdpcheck-adapter", "fully_shard", "-k", "completes"
    )
    result.assert_outcomes(passed=2, deselected=2 * 2)


def test_a_skip_of_a_promised_check_fails_the_session(chapter: pytest.Pytester) -> None:
    chapter.makeconftest("import pytest\ndef pytest_runtest_setup(item): pytest.skip('a hardware we do not have')")
    result = _pytest(chapter, "-p", "no:xdist", "--fsdpcheck-adapter", TOY)
    result.assert_outcomes(skipped=3)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["only 0 of 2 promised checks ran: this is a failure"])


def test_laws_are_chosen_by_name_and_the_seed_and_the_budget_are_those_that_were_given(
    chapter: pytest.Pytester,
) -> None:
    """A budget that is spent before the first case leaves too few of them, which is no pass."""
    chosen = ("--fsdpcheck-adapter", TOY, "--fsdpcheck-law", "toy.comp*", "--fsdpcheck-json", "told.json")
    result = _pytest(chapter, "-p", "no:xdist", *chosen, "--fsdpcheck-seed", "7", "--fsdpcheck-budget", "1e-9")
    result.assert_outcomes(failed=1, deselected=2)
    data = json.loads((chapter.path / "told.json").read_text())
    assert (data["plan"]["seed"], data["plan"]["budget"], data["plan"]["laws"]) == (7, 1e-9, ["toy.comp*"])
    assert [(one["law"], one["status"], one["cases"]) for one in data["verdicts"]] == [("toy.completes", "no case", 0)]


@pytest.mark.nightly
def test_laws_run_on_ones_own_model(chapter: pytest.Pytester) -> None:
    chapter.path.joinpath("test_chapter.py").unlink()
    own = str(TOYS / "own_models.py")
    model = ("--fsdpcheck-model", f"{own}:right", "--fsdpcheck-batch", f"{own}:batch")
    chosen = ("--fsdpcheck-adapter", "ddp", "--fsdpcheck-law", "training.plain", *model)
    result = _pytest(chapter, "-p", "no:xdist", "--pyargs", "fsdpcheck.properties", *chosen)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["1 checks promised, 1 ran, *"])


@pytest.mark.nightly
def test_collecting_alone_fails_nothing(chapter: pytest.Pytester) -> None:
    result = _pytest(chapter, "-p", "no:xdist", "--fsdpcheck-adapter", TOY, "--collect-only")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["2 checks promised; none is run to collect them"])
    result.stdout.no_fnmatch_line("*failure*")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--fsdpcheck-adapter", "no_such"), "unknown adapter 'no_such'"),
        (("--fsdpcheck-world-size", "0"), "wanted 1 <= first <= last"),
        (("--fsdpcheck-profile", "huge"), "invalid choice: 'huge'"),
        (("--fsdpcheck-budget", "soon"), "--fsdpcheck-budget is no time"),
        (("--fsdpcheck-batch", "mine.py:batch"), "--fsdpcheck-batch is about a model of your own"),
        (("--fsdpcheck-baseline", "gone.json"), "there is no baseline in gone.json"),
        (("--fsdpcheck-json", "gone/told.json"), "--fsdpcheck-json cannot be written"),
        (("--fsdpcheck-law", "toy.complete"), "no law that was collected matches 'toy.complete'. Did you mean"),
    ],
)
def test_bad_options_are_usage_errors(chapter: pytest.Pytester, arguments: tuple[str, str], said: str) -> None:
    result = _pytest(chapter, "-p", "no:xdist", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{said}*"])


@pytest.mark.nightly
def test_a_promise_without_what_its_laws_judge_by_is_a_usage_error(chapter: pytest.Pytester) -> None:
    """As in ``fsdpcheck run``: a check of it would be skipped, and the session be green."""
    chapter.makepyfile(
        mine="from fsdpcheck.adapter import Features\n"
        "class Mine:\n"
        "    name, features = 'mine', Features(promises=frozenset({'plain', 'padding.zero'}))\n"
        "    def build(self, model, setup): ...\n"
    )
    result = _pytest(chapter, "-p", "no:xdist", "--fsdpcheck-adapter", "mine.py:Mine")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*adapter 'mine.py:Mine' promises 'padding.zero' and does not show what*"])


def test_an_implementation_that_ends_its_process_is_not_green(chapter: pytest.Pytester) -> None:
    """At its import, by the real os._exit."""
    chapter.makepyfile(mine="import os\nos._exit(0)\n")
    result = _pytest(chapter, "-p", "no:xdist", "--fsdpcheck-adapter", "mine.py:adapter")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'mine.py:adapter' ended the process that imported it: it exited with code 0*"])


@pytest.mark.nightly
def test_what_an_implementation_left_ends_with_the_session(
    chapter: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that never ends, and a process in a session of its own; pytest is a program that bears no mark yet."""
    monkeypatch.delenv(leftovers.MARK, raising=False)
    chapter.makepyfile(
        mine=(TOYS / "unsharded.py").read_text()
        + "import os, threading, time\n"
        + "threading.Thread(target=threading.Event().wait).start()\n"
        + "if os.fork() == 0:\n"
        + "    os.setsid()\n"
        + "    open('part', 'w').write(str(os.getpid()))\n"
        + "    os.rename('part', 'litter')\n"
        + "    while True: time.sleep(9)\n"
        + "while not os.path.exists('litter'): pass\n"
    )
    chosen = ("--fsdpcheck-adapter", "mine.py:adapter", "-k", "completes")
    result = _pytest(chapter, "-p", "no:xdist", *chosen, program=True)
    result.assert_outcomes(passed=1, deselected=2)
    left = int((chapter.path / "litter").read_text())
    assert left not in {entry.pid for entry in leftovers.living()}


@pytest.mark.nightly
def test_the_plugin_is_silent_where_no_law_is(chapter: pytest.Pytester) -> None:
    chapter.path.joinpath("test_chapter.py").write_text("def test_nothing(): pass")
    result = _pytest(chapter, "-p", "no:xdist")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*fsdpcheck*promised*")


@pytest.mark.nightly
def test_the_laws_run_from_anywhere_by_their_canonical_name(chapter: pytest.Pytester) -> None:
    """One light law of fsdpcheck itself, collected as ``--pyargs fsdpcheck.properties``."""
    chapter.path.joinpath("test_chapter.py").unlink()
    chosen = ("--fsdpcheck-adapter", "reference", "-k", "plain_training_is_the_single_device_one")
    result = _pytest(chapter, "-p", "no:xdist", "--pyargs", "fsdpcheck.properties", *chosen)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["1 checks promised, 1 ran, *"])
