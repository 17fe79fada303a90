"""Each mechanism changes something: what a run gives back is other with it than without, and its altered line runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdpcheck.case import LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines._common import patches
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.execution import RunRequest
from tests.common.tables import each
from tests.impl.conftest import Ranks
from tests.mechanisms.by_hand import Situation
from tests.mechanisms.planted import ALL, COLLECTIONS, table
from tests.mechanisms.planting import Mechanism
from tests.mechanisms.situations import SITUATIONS
from tests.mechanisms.training import told

HERE = Path(__file__).parent
KINDS = {"hang": {"deadlock", "mismatch"}, "exception": {"raised"}}
"""What cannot be read off from what is returned -> kinds of failures of a run that it can be."""
ONE_OF_EACH = [next(iter(collection.mechanisms)) for collection in COLLECTIONS]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    simulated = Ranks()
    yield simulated
    simulated.engine.close()


def outcome(ranks: Ranks, situation: Situation, folder: Path) -> tuple[str, str]:
    """(kind of failure, or "", what was returned or how it failed)."""
    folder.mkdir()
    execution = ranks.run(lambda rank: situation.body(rank, folder), situation.ranks)
    if execution.failure is not None:
        return execution.failure.kind, execution.failure.text
    return "", told([ranks.returned[rank] for rank in range(situation.ranks)])


def assert_effective(ranks: Ranks, folder: Path, name: str) -> None:
    mechanism, situation = ALL[name], SITUATIONS[name]
    sound = outcome(ranks, situation, folder / "sound")
    with mechanism() as planted:
        faulty = outcome(ranks, situation, folder / "faulty")
    assert planted.hits > 0, "its altered line did not run"
    assert faulty != sound, "nothing is changed"
    if sound[0]:
        assert sound[0] == "raised", sound[1]
        assert not faulty[0], "it hides an error, and another one comes"
    else:
        assert faulty[0] in KINDS.get(mechanism.quantity, {""}), faulty
    assert outcome(ranks, situation, folder / "again") == sound, "something of it is left"


@each("name", ONE_OF_EACH)
def test_some_are_effective(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    assert_effective(ranks, tmp_path_factory.mktemp(name), name)


@pytest.mark.nightly
@each("name", SITUATIONS)
def test_effective(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    assert_effective(ranks, tmp_path_factory.mktemp(name), name)


def test_each_that_is_said_to_be_shown_has_a_situation() -> None:
    assert set(SITUATIONS) == {name for name, mechanism in ALL.items() if mechanism.shown}
    assert all(mechanism.shown != bool(mechanism.why) for mechanism in ALL.values())


def test_names_and_changes_are_unique() -> None:
    assert len(ALL) == sum(len(collection.mechanisms) for collection in COLLECTIONS)
    assert len({mechanism.changes for mechanism in ALL.values()}) == len(ALL)


@each("mechanism", ALL.values(), [*ALL])
def test_code_is_exchanged_and_put_back(mechanism: Mechanism) -> None:
    targets = [change.target for change in mechanism.changes]
    before = [target.__code__ for target in targets]
    with mechanism():
        for target, code in zip(targets, before, strict=True):
            now = target.__code__
            assert now != code
            assert (now.co_filename, now.co_qualname) == (code.co_filename, code.co_qualname)
            assert now.co_firstlineno == code.co_firstlineno
    assert [target.__code__ for target in targets] == before


def test_one_is_an_install_by_its_dotted_name() -> None:
    """As ``fsdpcheck run --install tests.mechanisms.planted:NAME`` has it, without any law."""
    install = "tests.mechanisms.planted:normalised_by_one_forward"
    patches.check((install,))
    case = TrainingCase(ModelSpec((LayerSpec(2),)), mesh=MeshSpec(dp_shard=2))
    engine = InProcessEngine()
    execution = engine.run(RunRequest(case, "reference", installs=(install,)))
    engine.close()
    assert execution.failure is None, execution.failure.text
    assert execution.install_hits == {install: 2}


def test_the_table_is_in_the_readme() -> None:
    assert table().strip() in (HERE / "README.md").read_text(encoding="utf-8"), (
        "next: python -m tests.mechanisms.planted prints the table"
    )
