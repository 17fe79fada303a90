"""CHANGELOG.md is by reader: each entry stands once, under those whom it concerns."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"
READERS = (
    "check an implementation",
    "check a model, or functions, of their own",
    "write an adapter",
    "gate a repository in CI",
    "run on clusters and GPUs",
    "simulate, compare or trace a script",
    "train with the reference implementation",
    "write laws, measure them, or build fsdpcheck",
)
"""Who reads it: in each release some or all of them have a section, in this order."""


def wrong(text: str) -> list[str]:
    """What keeps a changelog from being by reader; nothing where it is."""
    told, entries = [], Counter[str]()
    for release, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        head, *sections = re.split(r"^### ", body, flags=re.MULTILINE)
        told += [f"{release}: under no reader: {line}" for line in head.splitlines() if line.startswith("- ")]
        readers = [section.partition("\n")[0].removeprefix("For those who ") for section in sections]
        if readers != [one for one in READERS if one in readers] or not readers:
            told.append(f"{release}: sections {readers}")
        for reader, section in zip(readers, sections, strict=True):
            found = re.findall(r"^- .*?(?=^- |\Z)", section, re.MULTILINE | re.DOTALL)
            told += [f"{release}: nothing for those who {reader}"] if not found else []
            entries.update(" ".join(entry.split()) for entry in found)
    return told + [f"{count} times: {entry}" for entry, count in entries.items() if count > 1]


@pytest.mark.skipif(not CHANGELOG.is_file(), reason="only a checkout has the changelog")
def test_every_entry_of_the_changelog_stands_once_under_its_readers() -> None:
    text = CHANGELOG.read_text(encoding="utf-8")
    assert wrong(text) == []
    assert all(f"### For those who {reader}\n" in text for reader in READERS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- A law.\n", "under no reader: - A law."),
        ("### For those who read\n\n- A law.\n", "sections ['read']"),
        (f"### For those who {READERS[1]}\n\n- A.\n\n### For those who {READERS[0]}\n\n- B.\n", "sections ["),
        (f"### For those who {READERS[0]}\n\n### For those who {READERS[1]}\n\n- B.\n", "nothing for those who check"),
        (f"### For those who {READERS[0]}\n\n- A\n  law.\n- A law.\n", "2 times: - A law."),
    ],
)
def test_an_entry_that_stands_nowhere_or_twice_is_noticed(text: str, said: str) -> None:
    told = wrong(f"# Changelog\n\n## 1.0\n\n{text}")
    assert any(said in one for one in told), told
