"""Writing: a file whole or not at all. Imports no torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def whole(file: Path, text: str) -> None:
    """Put ``text`` in place of what ``file`` holds, when all of it is written.

    A link stays and its target is replaced; what is no regular file, a device or a pipe, is written to as it is. Bytes
    of file names that are no UTF-8 are written by their numbers.
    Raises OSError; then what was there is there.
    """
    try:
        target = file.resolve()
    except RuntimeError as loop:  # what Python before 3.13 says of links that name each other
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file)) from loop
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    part = target.with_name(f"{target.name}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(part, target)
    except OSError:
        part.unlink(missing_ok=True)
        raise
