"""Checkpoints of torch.distributed.checkpoint (DCP) read without the implementation that wrote them, in one process.

Public API and documented metadata only. Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from fsdpcheck.adapters.contract import Stored

_MODEL = "model."


def stored(folder: str) -> list[Stored]:
    """Every piece of every tensor; those whose name in the file begins with "model." are parameters.

    Others belong to the parameter whose name is part of theirs, as in "optimizer.state.layer.weight.exp_avg".
    """
    metadata = FileSystemReader(folder).read_metadata()
    parameters = [name.removeprefix(_MODEL) for name in metadata.state_dict_metadata if name.startswith(_MODEL)]
    found = []
    for index, place in metadata.storage_data.items():
        entry = metadata.state_dict_metadata[index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            continue
        value = _tensor(Path(folder) / place.relative_path, place.offset, place.length)
        offsets = tuple(index.offset or (0,) * len(entry.size))
        sizes = next(tuple(chunk.sizes) for chunk in entry.chunks if tuple(chunk.offsets) == offsets)
        name, state = index.fqn.removeprefix(_MODEL), not index.fqn.startswith(_MODEL)
        of = max((p for p in parameters if f".{p}." in f".{name}."), key=len, default="") if state else ""
        found.append(Stored(name, tuple(entry.size), offsets, sizes, value, state, of))
    return found


def read(folder: str, model: nn.Module) -> None:
    """Fill the model by DCP's own loader. A tied parameter is read under its first name."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load({"model": values}, checkpoint_id=folder, no_dist=True)


def _tensor(file: Path, offset: int, length: int) -> Tensor:
    with file.open("rb") as data:
        data.seek(offset)
        value: Tensor = torch.load(io.BytesIO(data.read(length)), weights_only=True)
    return value
