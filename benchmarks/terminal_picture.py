"""``python -m benchmarks terminal-picture``: what a red session prints on a terminal, as docs/pictures/terminal.svg."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PICTURE: Final = ROOT / "docs" / "pictures" / "terminal.svg"
WORDS: Final = ("run", "--adapter", "docs/examples/skips_empty.py:adapter", "--law", "training.plain")
"""The session of README.md."""
_COLUMNS: Final = 120


def lines() -> Iterator[str]:
    """Run the session, write the picture, and say what it is of."""
    code, printed = on_a_terminal([sys.executable, "-m", "fsdpcheck", *WORDS])
    PICTURE.write_text(drawn(printed.replace(f"{ROOT}/", ""), f"fsdpcheck {' '.join(WORDS)}"), encoding="utf-8")
    yield f"{PICTURE.relative_to(ROOT)}: exit code {code}, {PICTURE.stat().st_size // 1000} kB"


def on_a_terminal(command: Sequence[str]) -> tuple[int, str]:
    """The exit code of a command whose stdout is a terminal, and what it prints there, colours too."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, _COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    environment |= {"TERM": "xterm-256color"}
    running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=its, stderr=subprocess.DEVNULL)
    os.close(its)
    parts = []
    while True:
        try:
            part = os.read(mine, 65536)
        except OSError:  # on Linux the end, when nobody has the other side any more
            break
        if not part:
            break
        parts.append(part)
    os.close(mine)
    return running.wait(), b"".join(parts).decode().replace("\r\n", "\n")


def drawn(printed: str, title: str) -> str:
    """An SVG of what was printed. It names no font that would be fetched: a reader's own monospaced one is used."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(printed.rstrip()), soft_wrap=False, highlight=False)
    picture = console.export_svg(title=title, unique_id="terminal")
    return re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
