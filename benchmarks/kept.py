"""Rows of a long study in a file, as they come: a study that is stopped goes on with what the file does not hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Kept:
    """Rows of JSON data by the values of their ``keys``; each that is added is a line of the file at once.

    Delete the file after a change of code. ``os.devnull`` keeps nothing.
    """

    def __init__(self, path: str, *keys: str) -> None:
        self._path, self._keys = Path(path), keys
        held = path != os.devnull and self._path.exists()
        lines = self._path.read_text(encoding="utf-8").splitlines() if held else []
        self._rows = {self._key(row): row for row in map(json.loads, lines)}

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return key in self._rows

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, in place of one with the same key."""
        self._rows[self._key(row)] = row
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows, in the order they came."""
        return list(self._rows.values())

    def _key(self, row: dict[str, Any]) -> tuple[object, ...]:
        return tuple(row[key] for key in self._keys)
