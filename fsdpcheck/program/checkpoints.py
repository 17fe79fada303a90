"""Reading a checkpoint as its user would: all pieces in it, and a model that it fills."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fsdpcheck import adapters
from fsdpcheck.adapters.contract import Keeping, Stored
from fsdpcheck.case import TrainingCase
from fsdpcheck.compat import frames_private
from fsdpcheck.errors import FsdpcheckError, NotReadable, excerpt
from fsdpcheck.workload import models


def stored(adapter: str, folder: str) -> list[Stored]:
    """All pieces of all tensors in the checkpoint, each with how many elements lie in the file for it."""
    pieces = cast(Keeping, adapters.load(adapter)).stored(folder)
    return [replace(piece, held=_held(piece.value)) for piece in pieces]


def read(adapter: str, folder: str, case: TrainingCase) -> dict[str, Tensor]:
    """Parameters by name of an unsharded model that the checkpoint fills; NaN where it fills nothing.

    Raises NotReadable for what the implementation raises.
    """
    model = models.build(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    keeping = cast(Keeping, adapters.load(adapter))
    try:
        keeping.read(folder, model)
    except FsdpcheckError:
        raise
    except Exception as error:
        said = f"{excerpt.kind(error)}: {excerpt.said(error)}".replace(folder, "FOLDER")
        raise NotReadable(f"{said}, at {_place(error)}") from error
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _place(error: Exception) -> str:
    """file:line of the innermost frame outside of torch and Python's own libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frames_private.is_plumbing(frame.filename)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


def _held(value: Tensor) -> int:
    return value.untyped_storage().nbytes() // value.element_size()
