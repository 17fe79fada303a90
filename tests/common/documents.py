"""What the documents show: blocks by their language, and command lines of documents, of help texts and of examples."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fsdpcheck import cli
from fsdpcheck.cli import listing, preflight, replay, run

ROOT: Final = Path(__file__).parents[2]
DOCUMENTS: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES: Final = ROOT / "docs" / "examples"
"""Each repository in it has commands of its own, which run in its folder."""


def blocks(text: str, language: str) -> list[str]:
    """What stands between fences of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """(where it stands, command line) of all that documents show in blocks, and of the examples of the help.

    In a block of a console it stands behind "$ "; a bare ``fsdpcheck run`` is one in a block of text too.
    """
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        lines = [line for block in blocks(text, "console") for line in block.splitlines()]
        found += [(path.name, line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]
        printed = [line for block in blocks(text, "text") for line in block.splitlines()]
        found += [(path.name, line) for line in printed if line.startswith("fsdpcheck run ")]
    for text in (run.EPILOG, preflight._EPILOG, replay.EPILOG, listing._EPILOG, cli._WORDLESS):
        lines = [line.strip() for line in text.splitlines() if re.match(r"  (fsdpcheck|torchrun) ", line)]
        found += [("help", re.split(r"\s{2,}", line)[0]) for line in lines]
    return found


def of_examples() -> list[tuple[str, str]]:
    """(folder, command line) of what the repositories of docs/examples show."""
    return [
        (path.parent.name, line.removeprefix("$ "))
        for path in sorted(EXAMPLES.glob("*/README.md"))
        for block in blocks(path.read_text(encoding="utf-8"), "console")
        for line in block.splitlines()
    ]


def parts(line: str) -> Iterator[list[str]]:
    """The commands of a line, each in words, without its comment."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word == "&&":
            yield words
            words = []
        else:
            words.append(word)
