"""The commit that a row of a record is of."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path


@cache
def revision(*, short: bool = True) -> str:
    """The commit of this checkout; "unknown" where there is none, or no git."""
    command = ["git", "rev-parse", *(["--short"] if short else []), "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"
