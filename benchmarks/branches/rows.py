"""Sessions whose union is asked for: the reference by chapter, its variants, and users' models with further layers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fsdpcheck.judging.registry import chapters

_MODELS: Final = Path(__file__).parent / "models.py"
_PRIVATE: Final = ("norms.*", "clipping.*")
_HOLDS: Final = (0, 2)
"""Exit codes of a session without a finding: 2 where a law had no case, as some have of a model with few units."""


class Failed(Exception):
    """A session that ended by a finding or an error."""


@dataclass(frozen=True)
class Row:
    """A session: ``adapter``, ``laws`` as globs, and what else ``fsdpcheck run`` is given."""

    name: str
    adapter: str
    laws: tuple[str, ...]
    more: tuple[str, ...] = ()

    def data(self, folder: Path) -> Path:
        """Its file of coverage data."""
        return folder / f"{self.name.replace(':', '.').replace(' ', '-')}.data"


def _of_model(name: str, batch: str, *, adapter: str = "reference", real: bool = False) -> Row:
    given = ("--model", f"{_MODELS}:{name}", "--batch", f"{_MODELS}:{batch}", "--world-size", "1-3")
    laws = ("rounding.*", "precision.*") if real else _PRIVATE
    return Row(f"{adapter} {name}{' real' * real}", adapter, laws, (*given, *(("--real",) if real else ())))


def _of_chapters(adapter: str) -> tuple[Row, ...]:
    names = sorted({name.partition(".")[0] for name in chapters()})
    return tuple(Row(f"{adapter} {name}", adapter, (f"{name}.*",)) for name in names)


ROWS: Final[tuple[Row, ...]] = (
    *_of_chapters("reference"),
    *_of_chapters("reference_fsdp2"),
    *(
        Row(name, name, (*_PRIVATE, "precision.*"))
        for name in (
            *("reference:bookkeeping", "reference:flash", "reference:flash_bookkeeping", "reference:dropping"),
            *("reference_fsdp2:bookkeeping", "reference_fsdp2:flash_bookkeeping"),
        )
    ),
    Row("reference_fsdp2:bookkeeping ignored", "reference_fsdp2:bookkeeping", ("*.ignored",)),
    *(
        _of_model(name, batch, adapter=adapter)
        for adapter in ("reference", "reference:bookkeeping", "reference:flash_bookkeeping")
        for name, batch in (("attention", "of_tokens"), ("causal_attention", "of_tokens"), ("gated", "of_rows"))
    ),
    *(
        _of_model(name, batch, adapter="reference:bookkeeping", real=True)
        for name, batch in (("masked_attention", "of_tokens"), ("recurrent", "of_tokens"), ("frozen_bag", "of_tokens"))
    ),
    *(
        _of_model(name, batch, adapter="reference:bookkeeping")
        for name, batch in (("bag_of_sums", "of_tokens"), ("frozen_rows", "of_tokens"), ("convolved", "of_lines"))
    ),
)
"""In this order; each is asked what none before it has reached."""


def run(row: Row, data: Path) -> str:
    """Run a session into ``data``; its last line. Raises Failed for a finding or an error, and leaves no data."""
    laws = [word for law in row.laws for word in ("--law", law)]
    asked = ("run", "--adapter", row.adapter, *laws, *row.more, "--profile", "quick", "--coverage", str(data))
    ran = subprocess.run((sys.executable, "-m", "fsdpcheck", *asked), capture_output=True, text=True, check=False)
    if ran.returncode not in _HOLDS or not data.exists():
        data.unlink(missing_ok=True)
        raise Failed(f"{row.name}: exit code {ran.returncode}\n{ran.stdout[-3000:]}{ran.stderr[-2000:]}")
    return next(line for line in reversed(ran.stdout.splitlines()) if "checks hold" in line)
