"""Checkpoints that a rank saves: each tensor in them, by file and key."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from fsdpcheck.comparison.observation.rank_log import RankLog
from fsdpcheck.compat import layouts_private
from fsdpcheck.execution.pieces import NotPlaced

READ: Final = " as read"
"""After the name of a tensor that was read from the files of a distributed checkpoint, by one process without ranks."""


class Checkpoints:
    """Keeps what a rank saves, by the last part of the file's path, for folders are each run's own."""

    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._saves: Counter[tuple[int, str]] = Counter()

    def keep(self, value: object, file: object) -> str:
        """``value`` is about to be saved to ``file``; what that is called."""
        if isinstance(value, nn.Module | Optimizer):
            self._log.note(
                f"a {type(value).__name__} that is saved whole is not compared: its state_dict may be collective"
            )
        name, moment = self._name(file), self._log.now()
        for key, tensor in _tensors(value):
            try:
                for number, piece in enumerate(self._pieces(tensor)):
                    self._log.keep_named(
                        "checkpoint", f"{name}:{key}" + (f" block {number}" if number else ""), piece, moment
                    )
            except NotPlaced as unknown:
                self._log.note(f"{key} of checkpoint {name} is not compared: {unknown}")
        return name

    def read(self, name: str, folder: object) -> None:
        """A distributed checkpoint has been saved: read it as a process without ranks does, and keep what it holds."""
        if not isinstance(folder, str | os.PathLike) or not os.path.exists(os.path.join(folder, ".metadata")):
            return
        with layouts_private.aside():
            reader, moment = FileSystemReader(folder), self._log.now()
            held = reader.read_metadata().state_dict_metadata
            tensors: dict[str, Any] = {
                key: torch.empty(kind.size, dtype=kind.properties.dtype)
                for key, kind in held.items()
                if isinstance(kind, TensorStorageMetadata)
            }
            for tensor in tensors.values():  # what no rank has written stays what nobody would write
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
            load(tensors, storage_reader=reader, no_dist=True)
            for key, tensor in tensors.items():
                self._log.keep_named("checkpoint", f"{name}:{key}{READ}", self._log.pieces.of(tensor), moment)

    def _pieces(self, tensor: Any) -> Iterator[Any]:
        blocks = layouts_private.blocks_of(tensor)
        if blocks is None:
            yield self._log.pieces.of(tensor)
            return
        for block in blocks:
            yield self._log.pieces.of_block(block.shape, block.values, block.offsets)

    def _name(self, file: object) -> str:
        path = getattr(file, "name", file) if not isinstance(file, str | os.PathLike) else file
        name = os.path.basename(os.fspath(path).rstrip(os.sep)) if isinstance(path, str | os.PathLike) else "(stream)"
        self._saves[self._log.step, name] += 1
        times = self._saves[self._log.step, name]
        return name if times == 1 else f"{name}#{times}"


def _tensors(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor of nested dicts and lists, by its dotted path."""
    if isinstance(value, Tensor) or layouts_private.blocks_of(value) is not None:
        yield path, value
        return
    if isinstance(value, Mapping):
        inner: Any = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    else:
        return
    for name, one in inner:
        yield from _tensors(one, f"{path}.{name}" if path else str(name))
