"""Saving and loading: sharded and full state dicts, and checkpoints that any number of ranks and either way reads.

A training that is saved at W ranks and goes on at W' has the bits of one that never stopped, wherever the arithmetic
of a step does not depend on W (gradients whose sums are exact, elementwise optimizers).

What a checkpoint holds, each tensor in its own shape and under one name, whoever held which part of it:

- ``model.<canonical name>``: trainable and frozen parameters (a tied one once), and persistent buffers;
- ``optimizer.state.<canonical name>.<key>``: elementwise optimizer state;
- a header: the number of steps taken, the optimizer's step counters and hyperparameters by canonical name, ``extra``.

The number of steps taken is the model's own and always saved and loaded with its parameters, with or without an
optimizer: noise is a function of it, and a private training that began at step 0 again would release noise twice.
Keys of noise are never saved.

``extra`` is the place for whatever else must resume, as objects by name with ``state_dict()`` and
``load_state_dict()`` (``Stateful``): learning-rate schedulers, a sampler. It is replicated: plain data that every rank
holds alike, which saving checks. It lies readable in the file. The global random number generators of ranks are not
saved: their state belongs to one number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..sharding import collectives
from ..sharding.protocol import Sharded
from ..sharding.spans import Span
from . import checkpoint, optimizer_state, plain_data
from .optimizer_state import Described, short
from .planners import StateError

FORMAT = 2
MODEL = "model."


class Stateful(Protocol):
    """Anything that can say and take back its state as plain data, like a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


NOTHING: Mapping[str, Stateful] = {}


def sharded_state_dict(model: Sharded) -> dict[str, Span]:
    """What this rank holds of every parameter, frozen ones too, and of every persistent buffer, by canonical name.

    No communication. Spans are live and never cover padding; ``writes`` is False where another rank holds a copy.
    """
    first = model.replicas.rank == 0
    found = {}
    for shard in [*model.shards(), *model.frozen_shards()]:
        for name, span in model.cut(shard, shard.detach()).items():
            found[name] = replace(span, writes=first and span.writes)
    for name, buffer in _buffers(model).items():
        found[name] = Span(buffer.shape, 0, buffer.detach().reshape(-1), first and model.axis.rank == 0)
    return found


def full_state_dict(model: Sharded, *, everywhere: bool = True) -> dict[str, Tensor]:
    """What ``state_dict()`` of the unsharded module would be: whole new tensors, tied ones under all of their names.

    All ranks call it together. Unless ``everywhere``, only rank 0 of the sharding axis gets it, and the others, which
    then never hold a whole tensor, get {}.
    """
    values = model.full_values() if everywhere else _on_rank_0(model)
    if not values:
        return {}
    whole = {slot.name: values[uses[0].name] for uses in model.places for slot in uses}
    return whole | {name: buffer.detach().clone() for name, buffer in _buffers(model).items()}


def save(
    folder: checkpoint.Folder,
    model: Sharded,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Stateful] = NOTHING,
) -> None:
    """Write a checkpoint into ``folder``, new or empty, that all ranks can reach. All ranks call it, between steps.

    ``model.steps_taken``, which noise is a function of, goes with the parameters and cannot be forgotten.
    Raises StateError, on all ranks, and TypeError for state that is no plain data.
    """
    spans = {MODEL + name: span for name, span in sharded_state_dict(model).items()}
    header: dict[str, Any] = {"format": FORMAT, "steps_taken": model.steps_taken, "optimizer": None, "extra": {}}
    if optimizer is not None:
        spans |= optimizer_state.spans(model, optimizer)
        header["optimizer"] = asdict(optimizer_state.describe(model, optimizer))
    for name, stateful in extra.items():
        header["extra"][name] = stateful.state_dict()
        plain_data.check(header["extra"][name], f"extra[{name!r}].state_dict()")
    checkpoint.write(folder, spans, header, _group(model))


def load(
    folder: checkpoint.Folder,
    model: Sharded,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Stateful] = NOTHING,
) -> None:
    """Fill ``model`` in place from a checkpoint; to resume, ``optimizer`` and ``extra`` too. All ranks call it.

    Without an optimizer only the model and its number of steps are read; a file that DCP's own planner wrote has none,
    and leaves it as it is. With one, ``extra`` must name exactly what was saved.
    Raises StateError on all ranks: before anything is changed, unless the file fits; a file that cannot be read to its
    end leaves the model half filled.
    """
    loading = _Loading(model, optimizer, extra)
    model.reshard()
    with torch.no_grad():
        checkpoint.read(folder, loading.wanted, _group(model))
        loading.take_over()


class _Loading:
    """One load: what it asks of the file, and what it does once all ranks have read it."""

    def __init__(self, model: Sharded, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Stateful]) -> None:
        self.model, self.optimizer, self.extra = model, optimizer, extra
        self.spans = sharded_state_dict(model)
        self.saved: Any = None
        self.prepared: optimizer_state.Prepared | None = None

    def wanted(self, metadata: Metadata) -> dict[str, Span]:
        """The spans to fill, after checking that the file fits; nothing of the model is touched."""
        stored = {n: s for n, s in metadata.state_dict_metadata.items() if isinstance(s, TensorStorageMetadata)}
        check_model({n.removeprefix(MODEL): s for n, s in stored.items() if n.startswith(MODEL)}, self.spans)
        found = {MODEL + name: span for name, span in self.spans.items()}
        self.saved = checkpoint.header_of(metadata)
        if self.optimizer is None and not self.extra:
            return found
        _check_header(self.saved, self.optimizer is not None, self.extra)
        if self.optimizer is not None:
            dtypes = {name: entry.properties.dtype for name, entry in stored.items()}
            described = Described(**self.saved["optimizer"])
            self.prepared = optimizer_state.prepare(self.model, self.optimizer, described, dtypes)
            found |= self.prepared.spans
        return found

    def take_over(self) -> None:
        """Give what was read to its owners; spans of parameters were filled in place."""
        for name, buffer in _buffers(self.model).items():
            buffer.copy_(self.spans[name].value.view(buffer.shape))
        if self.saved is not None:
            count_on(self.model, self.saved)
        if self.prepared is not None and self.optimizer is not None:
            self.prepared.take_over(self.optimizer)
        for name, stateful in self.extra.items():
            stateful.load_state_dict(self.saved["extra"][name])


def count_on(model: Sharded, header: Mapping[str, Any]) -> None:
    """The next step of ``model`` is the one after the last that was saved: its noise was never drawn before."""
    model.steps_taken = header["steps_taken"]


def check_model(stored: Mapping[str, TensorStorageMetadata], spans: Mapping[str, Span]) -> None:
    """Raise StateError unless a file holds exactly the tensors of a model, by name, shape and dtype."""
    missing, unexpected = sorted(spans.keys() - stored.keys()), sorted(stored.keys() - spans.keys())
    if missing or unexpected:
        raise StateError(
            f"the checkpoint was saved by another model\n"
            f"  got     a file without {short(missing)}, and with {short(unexpected)} that the model has not\n"
            f"  wanted  the {len(spans)} parameters and buffers of this model, a tied parameter under its first name\n"
            f"  next    build the model as it was when saved, with the same ties, or rename what the file holds"
        )
    for name, span in spans.items():
        size, dtype = stored[name].size, stored[name].properties.dtype
        if (size, dtype) != (span.shape, span.value.dtype):
            raise StateError(
                f"{name} has another shape or dtype in the checkpoint\n  got     {list(size)} {dtype}\n"
                f"  wanted  {list(span.shape)} {span.value.dtype}\n  next    build the model as it was when saved"
            )


def _check_header(header: Any, with_optimizer: bool, extra: Mapping[str, Stateful]) -> None:
    found = "no header" if header is None else f"format {header['format']}"
    if found != f"format {FORMAT}":
        raise StateError(
            f"the checkpoint holds no training state that can be resumed\n"
            f"  got     {found}\n"
            f"  wanted  a checkpoint of format {FORMAT}, by save of this package\n  next    load the model only"
        )
    if with_optimizer and header["optimizer"] is None:
        raise StateError(
            "the checkpoint was saved without an optimizer\n  got     a model\n  wanted  its optimizer's state too\n"
            "  next    pass the optimizer to save, or load the model only"
        )
    if header["extra"].keys() != extra.keys():
        raise StateError(
            f"the checkpoint holds other extra state than asked for\n  got     {short(sorted(header['extra']))}\n"
            f"  wanted  {short(sorted(extra))}\n"
            f"  next    pass the same extra to save and to load; to load the model only, pass neither"
        )


def _on_rank_0(model: Sharded) -> dict[str, Tensor]:
    """Whole parameters on rank 0 of the sharding axis, {} elsewhere, by two messages a dtype: ranges, then elements."""
    buffers = _buffers(model)
    spans = {name: span for name, span in sharded_state_dict(model).items() if name not in buffers}
    whole: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(span.value.dtype for span in spans.values()):
        chosen = {name: span for name, span in spans.items() if span.value.dtype == dtype}
        own = torch.cat([span.value for span in chosen.values()])
        range_P2 = torch.tensor([[span.start, span.stop] for span in chosen.values()], device=own.device)
        range_WP2 = range_P2.new_empty(model.axis.size, *range_P2.shape)
        collectives.all_gather(collectives.WHOLE, range_WP2.view(-1), range_P2.view(-1), model.axis)
        longest = int((range_WP2[..., 1] - range_WP2[..., 0]).sum(1).max())
        padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
        everyone = collectives.gather(collectives.WHOLE, padded, model.axis)
        if everyone is not None:
            whole.update(_assembled(chosen, range_WP2, everyone.view(model.axis.size, longest)))
    return whole


def _assembled(spans: Mapping[str, Span], range_WP2: Tensor, everyone_WS: Tensor) -> dict[str, Tensor]:
    whole = {name: span.value.new_empty(span.shape.numel()) for name, span in spans.items()}
    for ranges, own in zip(range_WP2.tolist(), everyone_WS, strict=True):
        position = 0
        for tensor, (start, stop) in zip(whole.values(), ranges, strict=True):
            tensor[start:stop] = own[position : position + stop - start]
            position += stop - start
    return {name: tensor.view(spans[name].shape) for name, tensor in whole.items()}


def _buffers(model: Sharded) -> dict[str, Tensor]:
    """Persistent buffers, which every rank holds whole. Raises TypeError for a module with state of its own kind."""
    kept = model.module.state_dict(keep_vars=True)
    buffers = {n: b for n, b in model.module.named_buffers(remove_duplicate=False) if n in kept}
    parameters = {slot.name for uses in model.places for slot in uses}
    if unknown := sorted(kept.keys() - buffers.keys() - parameters):
        raise TypeError(
            f"the module keeps state that is neither parameter nor buffer\n  got     {short(unknown)}\n"
            f"  wanted  parameters and buffers\n  next    pass it to save and load as extra"
        )
    return buffers


def _group(model: Sharded) -> dist.ProcessGroup | None:
    """All ranks that hold the model; None if it is one."""
    if model.axis.size * model.replicas.size == 1:
        return None
    return model.axis.group if model.replicas.size == 1 else collectives.axis().group
