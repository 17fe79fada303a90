"""Every attack ends as its row says; all of them nightly, cheap ones daily."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from runner import take
from table import ATTACKS, Attack


def name(attack: Attack) -> str:
    return attack.name


@pytest.mark.nightly
@pytest.mark.parametrize("attack", ATTACKS, ids=name)
def test_an_attack_ends_as_its_row_says(attack: Attack, tmp_path: Path) -> None:
    outcome = take(attack, tmp_path)
    assert not outcome.wrong(attack), outcome.output[-3000:]


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack.daily], ids=name)
def test_a_cheap_attack_ends_as_its_row_says(attack: Attack, tmp_path: Path) -> None:
    outcome = take(attack, tmp_path)
    assert not outcome.wrong(attack), outcome.output[-3000:]


def test_names_are_unique_and_files_short() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert all(len(path.read_text().splitlines()) < 350 for path in Path(__file__).parent.glob("*.py"))
