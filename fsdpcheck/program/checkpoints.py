"""Reading a checkpoint as its user would: all pieces in it, and a model that it fills."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fsdpcheck import adapters
from fsdpcheck.adapters.contract import Keeping, Stored
from fsdpcheck.case import TrainingCase
from fsdpcheck.errors import FsdpcheckError, NotReadable, excerpt
from fsdpcheck.execution.outcomes import where
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
        place = where(error.__traceback__)
        raise NotReadable(f"{said}, at {place}" if place else said) from error
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _held(value: Tensor) -> int:
    return value.untyped_storage().nbytes() // value.element_size()
