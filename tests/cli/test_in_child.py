"""What a command's child does with what its parent has left."""

from __future__ import annotations

import gc
from pathlib import Path

from fsdpcheck.cli.in_child import in_child


class Left:
    """Garbage that only the collector finds; its end is written down."""

    def __init__(self, file: Path) -> None:
        self.file, self.itself = file, self

    def __del__(self) -> None:
        self.file.write_text("ended")


def test_garbage_of_the_parent_is_not_collected_in_the_child(tmp_path: Path) -> None:
    """A group of processes among it has threads in the parent alone: its end was a segmentation fault."""
    gc.disable()
    try:
        left = Left(tmp_path / "parent's")
        del left
        assert in_child(lambda: gc.collect() * 0, None) == 0
        assert not list(tmp_path.iterdir())

        def own() -> int:
            Left(tmp_path / "own")
            return gc.collect() * 0

        assert in_child(own, None) == 0
        assert [path.name for path in tmp_path.iterdir()] == ["own"]
    finally:
        gc.enable()
        gc.collect()
