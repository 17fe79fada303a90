"""The picture of a terminal in docs/reports.md: of what a session prints there now, and nothing is fetched for it."""

from __future__ import annotations

import html
import re
import sys

import pytest

terminal_picture = pytest.importorskip("benchmarks.terminal_picture", reason="only a checkout has the benchmarks")

README = terminal_picture.ROOT / "README.md"


def shown(picture: str) -> str:
    """All text of an SVG, without spaces: a terminal breaks lines where it likes."""
    return "".join(html.unescape("".join(re.findall(r"<text[^>]*>(.*?)</text>", picture))).split())


def fetched(picture: str) -> list[str]:
    return re.findall(r"@font-face|@import|url\((?!#)[^)]*\)|href=\S+", picture)


@pytest.mark.skipif(not terminal_picture.PICTURE.is_file(), reason="only a checkout has the documents")
def test_the_picture_shows_the_finding_of_the_readme_and_fetches_nothing() -> None:
    picture = terminal_picture.PICTURE.read_text(encoding="utf-8")
    finding = re.findall(r"^```text\n(FINDING.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)[0]
    assert "".join(finding.split()) in shown(picture), "next: python -m benchmarks terminal-picture"
    assert "".join(terminal_picture.WORDS) in shown(picture)
    assert fetched(picture) == []
    assert len(picture) < 100_000


def test_what_a_command_prints_on_a_terminal_is_drawn_with_its_colours() -> None:
    program = "import sys; print(sys.stdout.isatty(), '\\x1b[31mred & <bad>\\x1b[0m'); sys.exit(3)"
    code, printed = terminal_picture.on_a_terminal([sys.executable, "-c", program])
    assert (code, printed) == (3, "True \x1b[31mred & <bad>\x1b[0m\n")
    picture = terminal_picture.drawn(printed, "a title")
    assert {"Truered&<bad>", "atitle"} == {part for part in ("Truered&<bad>", "atitle") if part in shown(picture)}
    assert re.search(r"fill: #cc555a", picture), "red"
    assert fetched(picture) == []
    assert fetched('@font-face { src: url("https://x.y/z") }') != []
