"""The peers on the pairs: what each is run on, what is kept of its words, and what the document says of them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.communication", reason="only a checkout has the benchmarks")
from benchmarks.communication import dumps, judged, local_tensors, peers, real, tables
from benchmarks.communication.pairs import Pair, pairs
from fsdpcheck.engines._real.forks import Said, Say
from tests.common.releases import reads_dumps_of_gloo

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

DOCUMENT = Path(__file__).parents[2] / "docs" / "communication.md"


def _pair(name: str) -> Pair:
    return next(pair for pair in pairs() if pair.name == name)


def test_every_peer_is_on_record_on_both_programs_of_every_pair_as_it_is_now() -> None:
    wanted = {(peer, pair.name, faulty) for peer in peers.PEERS for pair in pairs() for faulty in (False, True)}
    lacking = sorted(wanted - peers.recorded().keys())
    assert lacking == [], "next: python -m benchmarks communication, until nothing is left"


def test_the_document_has_the_tables_of_the_record() -> None:
    table = "\n".join(tables.on_record())
    assert table in DOCUMENT.read_text(encoding="utf-8"), (
        "next: put in what `python -m benchmarks communication --status` prints"
    )


@pytest.mark.parametrize(
    "record", [peers.RECORD, judged.RECORD, *tables.FIRST_RUNS.values()], ids=lambda path: path.name
)
def test_no_record_says_where_the_repository_or_torch_lay(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|Users|work|opt|usr)/[^\s:\"]*", text) == []


@reads_dumps_of_gloo
def test_analysers_hear_of_a_rank_that_did_not_come_from_the_same_dumps() -> None:
    pair = _pair("one_barrier_more_on_one_rank")
    said = dumps.said(pair, True)
    assert {name: outcome.kind for name, outcome in said.items()} == {
        "torchfrtrace on dumps of gloo": "raised",
        "torchfrtrace, groups filled in": "reported",
        "fsdpcheck on dumps of gloo": "reported",
        "fsdpcheck, groups filled in": "reported",
    }
    assert said["torchfrtrace on dumps of gloo"].text == "raised: KeyError: ('0', 1)"
    assert "missing ranks: {0}" in said["torchfrtrace, groups filled in"].text
    for outcome in list(said.values())[1:]:
        assert pair.lines_in(outcome.text) & set(pair.lines)
    assert {outcome.kind for name, outcome in dumps.said(pair, False).items() if name in list(said)[1:]} == {
        "completed"
    }


def test_one_program_for_all_ranks_says_that_it_has_no_number_of_its_rank() -> None:
    outcome = local_tensors.run(_pair("broadcast_and_all_reduce_swapped"), False, 60.0)
    assert outcome.kind == "raised"
    assert outcome.text.startswith("all ranks: raised: AttributeError: 'LocalIntNode' object has no attribute 'int_'")


def test_the_last_words_of_a_process_that_a_signal_ends_are_heard() -> None:
    def ends(_: Say) -> None:
        os.write(2, b"what():  sizes differ\n")
        os.kill(os.getpid(), signal.SIGKILL)

    outcome = real.collected({(0,): ends, (1,): lambda say: say(1, Said("returned", "1"))}, 60.0)
    assert (outcome.kind, outcome.text) == ("ended", "rank 0: ended: signal SIGKILL\nwhat():  sizes differ")


def test_what_a_rank_raises_names_the_lines_of_the_program_relative_to_the_repository() -> None:
    pair = _pair("broadcast_from_rank_outside_the_world")
    outcome = real.run(pair, True, 60.0)
    assert outcome.kind == "raised"
    assert pair.lines_in(outcome.text) & set(pair.lines)
    assert str(Path(__file__).parents[2]) not in outcome.text
