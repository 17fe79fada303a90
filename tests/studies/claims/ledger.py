"""docs/claims.md: the line that it has of each row, and where a row's line is not the one measured here."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import torch

ELSEWHERE = {} if importlib.util.find_spec("triton") else {"E1": "with Triton"}
ELSEWHERE |= {"E2": "without a GPU"} if torch.cuda.is_available() else {}

DOCUMENT = Path(__file__).parents[3] / "docs" / "claims.md"


@functools.cache
def written() -> dict[str, str]:
    """Each row's line, by its id; none where the files of the checkout are missing."""
    if not DOCUMENT.is_file():
        return {}
    lines = [line for line in DOCUMENT.read_text().splitlines() if re.match(r"\| [A-Z]\d", line)]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def verdict(line: str) -> str:
    """The verdict in a row's line."""
    return re.split(r" \| \*|\* \| ", line)[1]
