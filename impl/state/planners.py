"""Planners of torch.distributed.checkpoint (DCP) for spans: one that writes them, one that reads them.

DCP asks each rank for a plan, shows all plans to rank 0, then writes or reads what the plans say. Public API only:
``SavePlanner``, ``LoadPlanner``, their plans and items, ``create_default_global_save_plan`` and
``create_read_items_for_chunk_list``.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..sharding.spans import Box, Span
from . import plain_data

HEADER = "header"
Wanted = Callable[[Metadata], Mapping[str, Span]]
"""From what the file holds: the spans to fill. May raise StateError."""


class StateError(RuntimeError):
    """State cannot be saved or loaded; every rank of the call raises it."""


class SpanWriter(SavePlanner):
    """Writes spans by name, each by the ranks whose span says so, and ``header``, into ``folder`` if it is empty."""

    def __init__(self, spans: Mapping[str, Span], header: object, folder: str | os.PathLike[str]) -> None:
        self._spans, self._header, self._folder = spans, header, folder
        self._views: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: DCP's own dict stays empty, because it would log each entry."""

    def create_local_plan(self) -> SavePlan:
        _check_empty(self._folder)  # no rank writes before all have planned
        items = []
        for name, span in self._spans.items():
            for box, view in _to_write(span):
                index = MetadataIndex(name, box.offsets)
                self._views[index] = view
                data = TensorWriteData(_chunk(box), TensorProperties(span.value.dtype), span.shape)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        ranges = {name: (span.start, span.stop) for name, span in self._spans.items() if span.writes}
        sizes = {name: span.shape.numel() for name, span in self._spans.items()}
        return SavePlan(items, planner_data=(sizes, ranges, self._header))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _check_equal([plan.planner_data[2] for plan in all_plans], [plan.planner_data[0] for plan in all_plans])
        _check_tiles(all_plans[0].planner_data[0], [plan.planner_data[1] for plan in all_plans])
        plans, metadata = create_default_global_save_plan(all_plans)
        paths: dict[str, Any] = {name: tuple(name.split(".", 1)) for name in metadata.state_dict_metadata}
        metadata.planner_data = paths | {HEADER: self._header}  # paths: how DCP's own tools nest what they read
        return [replace(plan, planner_data=None) for plan in plans], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._views[write_item.index].clone()  # a view would take its whole storage, padding too, to the file


class SpanReader(LoadPlanner):
    """Reads the parts that fill the spans ``wanted`` of the file."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._metadata = Metadata({})
        self._views: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, span in self._wanted(self._metadata).items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            found = list(span.boxes())
            self._views.update({MetadataIndex(name, box.offsets): view for box, view in found})
            reads = create_read_items_for_chunk_list(name, stored, [_chunk(box) for box, _ in found])
            _check_complete(name, span, sum(math.prod(item.lengths) for item in reads))
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("spans are tensors")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self._views[read_item.dest_index]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: it was read into the span itself."""


def _to_write(span: Span) -> Iterator[tuple[Box, Tensor]]:
    """The boxes that this rank writes; of a tensor without elements one empty box, so that the file knows its name."""
    if not span.writes:
        return iter(())
    if span.shape.numel() == 0:
        return iter([(Box((0,) * len(span.shape), tuple(span.shape)), span.value.view(span.shape))])
    return span.boxes()


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _check_empty(folder: str | os.PathLike[str]) -> None:
    if found := sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        kind = "a checkpoint already" if ".metadata" in found else "files of something else, or of a save that broke"
        raise StateError(
            f"a checkpoint is written into an empty folder only, never over another one\n"
            f"  got     {folder}: {kind} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})\n"
            f"  wanted  a new folder, or an empty one\n"
            f"  next    save each step into a folder of its own, such as checkpoints/step-100, and delete what is old"
        )


def _check_equal(headers: Sequence[object], sizes: Sequence[object]) -> None:
    for rank in range(1, len(headers)):
        difference = plain_data.difference(headers[0], headers[rank]) or plain_data.difference(sizes[0], sizes[rank])
        if difference:
            raise StateError(
                f"state that all ranks must hold alike differs\n"
                f"  got     on rank 0 and on rank {rank}: {difference}\n  wanted  equal values on all ranks\n"
                f"  next    step schedulers, noise and optimizers alike; keep what is a rank's own elsewhere"
            )


def _check_tiles(sizes: Mapping[str, int], ranges: Sequence[Mapping[str, tuple[int, int]]]) -> None:
    """Each element of each tensor is written by exactly one rank."""
    for name, size in sizes.items():
        parts = sorted(part[name] for part in ranges if name in part and part[name][1] > part[name][0])
        ends = [0, *(stop for _, stop in parts)]
        if [start for start, _ in parts] != ends[:-1] or ends[-1] != size:
            raise StateError(
                f"the ranks' parts of {name} are not the whole of it\n  got     elements {parts}\n"
                f"  wanted  each of its {size} elements once\n  next    save from all ranks that share the model"
            )


def _check_complete(name: str, span: Span, found: int) -> None:
    if found != span.value.numel():
        raise StateError(
            f"the file lacks a part of {name}\n  got     {found} of its elements {span.start} to {span.stop}\n"
            f"  wanted  {span.value.numel()}\n  next    the file was not written whole: take another one"
        )
