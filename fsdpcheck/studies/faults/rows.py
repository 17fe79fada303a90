"""Rows of a matrix in a file, as they come: what was found out with the same code and options is not judged again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdpcheck.errors import UsageError, explain
from fsdpcheck.loading import provenance
from fsdpcheck.studies.faults.matrix import Row


class Kept:
    """Rows by fault, each with the options, fsdpcheck's sources and the files that the ranks had loaded.

    ``path``: JSON lines; None keeps nothing. Raises UsageError for a file of something else, or that cannot be written.
    """

    def __init__(self, path: Path | None, options: Mapping[str, Any]) -> None:
        self._path, self._options = path, json.loads(json.dumps(dict(options)))
        self._rows: dict[str, Row] = {}
        if path is None:
            return
        try:
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
                self._read(json.loads(line))
            path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise UsageError(explain(f"--keep {path}", got=error.strerror or str(error), wanted="a file")) from error
        except (ValueError, KeyError, TypeError) as error:
            what, got = f"--keep {path} holds no rows of `fsdpcheck faults`", f"{type(error).__name__}: {error}"
            raise UsageError(explain(what, got=got, then="name another file, or delete it")) from error

    def __getitem__(self, fault: str) -> Row | None:
        return self._rows.get(fault)

    def add(self, row: Row, files: Mapping[str, str]) -> None:
        """Keep a row; ``files``: path -> hash of all that ranks had loaded."""
        self._rows[row.fault] = row
        if self._path is not None:
            told = {"own": provenance.own(), "options": self._options, "files": dict(files), "row": row.to_data()}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")

    def _read(self, told: Mapping[str, Any]) -> None:
        row = Row.from_data(told["row"])
        same = told["own"] == provenance.own() and told["options"] == self._options
        if same and all(provenance.content(path) == then for path, then in told["files"].items()):
            self._rows[row.fault] = row
        else:
            self._rows.pop(row.fault, None)
