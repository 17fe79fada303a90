"""Spans in files of torch.distributed.checkpoint (DCP).

A file keeps each tensor under its own name and shape, whatever ranks held which part of it, so it can be read at any
number of ranks, by either way of sharding, and by DCP's own planners. Only what spans hold is written: no padding.
A ``header``, plain data that is equal on all ranks, lies in the file's metadata.

Messages, whatever the model's size: 9 calls to save, 7 to load, of plans only; the elements travel through the files.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ..sharding.spans import Span
from . import planners
from .planners import StateError, Wanted

Folder = str | os.PathLike[str]


def write(folder: Folder, spans: Mapping[str, Span], header: object, group: dist.ProcessGroup | None) -> None:
    """Write what all ranks of ``group`` hold (None: this process is alone) into ``folder``, new or empty.

    Raises StateError on all ranks if the folder holds anything, the ranks' spans do not tile each tensor exactly, or
    the ranks' headers differ.
    """
    writer = FileSystemWriter(folder, overwrite=False)
    with _plainly():
        planner = planners.SpanWriter(spans, header, folder)
        dcp_save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


def read(folder: Folder, wanted: Wanted, group: dist.ProcessGroup | None) -> None:
    """Fill, in place, the spans that ``wanted`` names. All ranks of ``group`` call it; each reads only its own parts.

    Raises StateError on all ranks for what ``wanted`` refuses on one, a folder without a checkpoint, and a file that
    lacks a part of a span.
    """
    if not os.path.exists(os.path.join(folder, ".metadata")):
        found = sorted(os.listdir(folder))[:5] if os.path.isdir(folder) else "no such folder"
        raise StateError(
            f"there is no checkpoint in this folder\n  got     {folder}: {found or 'empty'}\n"
            f"  wanted  the folder that was given to save, with its file .metadata\n"
            f"  next    a save that was interrupted leaves no .metadata: take the one before it"
        )
    reader = FileSystemReader(folder)
    with _plainly():
        dcp_load(
            {}, storage_reader=reader, planner=planners.SpanReader(wanted), process_group=group, no_dist=group is None
        )


def header_of(metadata: Metadata) -> Any:
    """The header of a file; None in a file that another program wrote."""
    return (metadata.planner_data or {}).get(planners.HEADER)


@contextmanager
def _plainly() -> Iterator[None]:
    """DCP's own error, which is no Exception and holds every rank's traceback, as the StateError of the first rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        rank = min(error.failures)
        cause = error.failures[rank][0]
        if isinstance(cause, StateError):
            raise StateError(str(cause)) from error
        raise StateError(
            f"rank {rank} could not read or write the checkpoint: {type(cause).__name__}: {cause}"
        ) from error
