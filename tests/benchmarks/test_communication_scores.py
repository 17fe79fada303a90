"""How the words of a judge are counted, on words that are made up."""

from __future__ import annotations

import pytest

pytest.importorskip("benchmarks.communication", reason="only a checkout has the benchmarks")
from benchmarks.communication.judged import Verdict
from benchmarks.communication.pairs import Expected, Pair
from benchmarks.communication.real import Outcome
from benchmarks.communication.scores import Score, accused_in, kinds_in, own_score, score

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

HERE = "tests/benchmarks/test_communication_scores.py"


def _program(faulty: bool) -> object:
    return faulty  # here


LINE = _program.__code__.co_firstlineno + 1
AT = f"  at {HERE}:{LINE}"
TWIN = Outcome("completed", "1.0; 1.0", 0.5)
CRASHED = (
    "rank 0: ended: signal SIGABRT\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  Received data size doesn't match expected size. "
    "Is there a distributed collective mismatch in your code?\n"
    f"rank 1: raised: RuntimeError: Connection closed by peer [127.0.0.1]:1. \n{AT}"
)
BARRIER = f"rank 0: raised: RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 8000 ms\n{AT}"
CLOCK = f"rank 0: raised: RuntimeError: Timed out waiting 8000ms for recv operation to complete\n{AT}"
ANALYSER = (
    "Not all ranks joining collective, sequence number: 3\nmissing ranks: {1}\nexpected ranks: {0, 1, 2}\n"
    f"collective stack trace: \n_program at {HERE}:{LINE}\n"
)
OWN = f"mismatch: call #0 on ranks [0, 1, 2] differs in op\n  rank 0: barrier()\n  rank 2: broadcast() at {HERE}:{LINE}"


def _pair(*kinds: str, ranks: tuple[int, ...] = ()) -> Pair:
    return Pair("made up", "made up", 3, _program, Expected(kinds, ranks))


@pytest.mark.parametrize(
    ("text", "kinds", "ranks"),
    [
        ("", set(), set()),
        (f"rank 2: raised: KeyError: 'weight'\n{AT}", {"raised"}, {2}),
        (f"all ranks: raised: KeyError: 'weight'\n{AT}", {"raised"}, set()),
        (CLOCK, set(), {0}),
        (BARRIER, {"deadlock", "unsafe", "raised"}, {0, 1, 2}),
        (CRASHED, {"mismatch", "lost", "exited"}, {0, 1}),
        (ANALYSER, {"deadlock", "unsafe"}, {1}),
        ("rank 1: ended: SystemExit(0)", {"exited"}, {1}),
        ("rank 1: ended: SystemExit('Test termination event occurs.')", {"exited"}, set()),
        ("ranks [1, 2] not at their end", set(), {1, 2}),
        ("Missing dump files from ranks {1}\n", {"lost"}, {1}),
        (OWN, {"mismatch"}, {0, 2}),
        (
            "unsafe: a call was never matched\n  missing: barrier() was never called by rank 1",
            {"unsafe", "deadlock"},
            {1},
        ),
        ("raised: KeyError: ('0', 1)", set(), set()),
    ],
)
def test_kinds_and_ranks_that_a_text_names(text: str, kinds: set[str], ranks: set[int]) -> None:
    assert (kinds_in(text), accused_in(text)) == (kinds, ranks)


@pytest.mark.parametrize(
    ("found", "pair", "score_of_it"),
    [
        (Outcome("raised", CRASHED, 1.0), _pair("mismatch", ranks=(1,)), (True, True, "said")),
        (Outcome("raised", CRASHED, 1.0), _pair("mismatch", ranks=(2,)), (False, False, "said")),
        (Outcome("raised", CRASHED.replace(AT, ""), 1.0), _pair("mismatch"), (False, False, "said")),
        (Outcome("raised", CRASHED, 1.0), _pair("deadlock"), (False, True, "said")),
        (Outcome("time-out", CLOCK, 8.0), _pair("deadlock", ranks=(0,)), (False, True, "time-out")),
        (Outcome("time-out", BARRIER, 8.0), _pair("deadlock", ranks=(1,)), (True, True, "said")),
        (Outcome("time-out", BARRIER, 8.0), _pair("order"), (False, True, "said")),
        (Outcome("reported", ANALYSER, 8.0), _pair("deadlock", ranks=(1,)), (True, True, "said")),
        (Outcome("reported", ANALYSER, 8.0), _pair("deadlock", ranks=(0,)), (False, False, "said")),
        (Outcome("completed", "1.0; 1.0", 1.0), _pair("in-flight"), (False, False, "nothing")),
        (Outcome("completed", "1.0; 2.0", 1.0), _pair("in-flight"), (False, False, "other result")),
    ],
)
def test_what_is_said_of_a_faulty_program(found: Outcome, pair: Pair, score_of_it: tuple[bool, bool, str]) -> None:
    got = score(pair, found, TWIN)
    assert (got.strict, got.placed, got.result) == score_of_it
    assert (got.alarm, got.seconds) == (False, found.seconds + TWIN.seconds)


@pytest.mark.parametrize("twin", [Outcome("time-out", CLOCK, 8.0), Outcome("reported", ANALYSER, 8.0),
                                  Outcome("reported", "We cannot decide what's wrong", 8.0),
                                  Outcome("raised", BARRIER, 1.0), Outcome("ended", CRASHED, 1.0)])  # fmt: skip
def test_what_accuses_the_twin_is_a_false_alarm_and_worth_nothing_on_the_faulty_program(twin: Outcome) -> None:
    got = score(_pair("deadlock", ranks=(1,)), Outcome("reported", ANALYSER, 1.0), twin)
    assert (got.alarm, got.strict, got.result) == (True, False, "said")


@pytest.mark.parametrize("twin", [Outcome("raised", f"all ranks: raised: AttributeError: no 'int_'\n{AT}", 1.0),
                                  Outcome("raised", "raised: KeyError: ('0', 1)", 1.0),
                                  Outcome("ended", "rank 0: ended: signal SIGSEGV", 1.0)])  # fmt: skip
def test_who_cannot_run_the_twin_is_not_asked_about_the_pair(twin: Outcome) -> None:
    got = score(_pair("raised"), twin, twin)
    assert got == Score(strict=False, placed=False, result="not applicable", alarm=False, seconds=2.0)


def test_fsdpcheck_is_counted_by_the_kind_of_its_verdict_alone() -> None:
    right = Verdict("mismatch", (0, 2), (LINE,), OWN, 1, False, 0.1)
    silent = Verdict("", (), (), "", 1, True, 0.2)
    pair = _pair("mismatch", ranks=(2,))
    assert own_score(pair, right, silent) == Score(True, True, "said", False, pytest.approx(0.3))
    assert own_score(_pair("unsafe"), right, silent) == Score(False, True, "said", False, pytest.approx(0.3))
    assert own_score(pair, silent, silent) == Score(False, False, "nothing", False, 0.4)
    assert own_score(pair, right, right) == Score(False, True, "said", True, 0.2)
