"""Operators by how they round: which are exact, which reduce, which draw random numbers, which make constants."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from fsdpcheck.comparison.precision.tables import ACCUMULATE, CAST, CONSTANT, DRAW, EXACT, REDUCTION
from fsdpcheck.compat import dispatch_private

Rounding = Literal["exact", "cast", "constant", "draw", "reduction", "rounding", "communication"]

KINDS: Final[dict[Rounding, str]] = {
    "exact": "moves or selects values, or changes signs: what it gives is the same number in every type",
    "cast": "copies into a type: rounds where that type is lower",
    "constant": "makes values of arguments that are no tensors",
    "draw": "draws random numbers",
    "reduction": "adds products or terms up: its error can be large beside what it gives",
    "rounding": "rounds what it gives: every operator that gives floats and is in no table",
    "communication": "hands tensors to a group of ranks",
}


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known of an operator. ``name``: as torch prints it. ``rounding``: one of KINDS.

    ``inputs``: of a reduction, the numbers of the arguments that are added up. ``accumulates``: the number of the
    argument that makes an exact one a reduction, or None. ``written``: numbers and names of the arguments that it
    writes. ``keeps``: whether it gives what it was given, written or viewed. ``salt``: a number of its name, the same
    in every process. ``tensors``, ``types``: the numbers of the arguments that may be tensors, or lists of them; types.
    """

    func: Any
    name: str
    base: str
    rounding: Rounding
    inputs: tuple[int, ...]
    accumulates: int | None
    written: frozenset[int | str]
    is_view: bool
    keeps: bool
    salt: int
    tensors: tuple[int, ...]
    types: tuple[int, ...]


_UNSAID: Final[dict[str, frozenset[int | str]]] = {"native_batch_norm": frozenset((3, 4))}
"""Arguments that an operator writes though its schema does not say so."""

_OPERATORS: dict[int, Operator] = {}
"""By identity of the operator, which is kept alive for it."""


def operator(func: Any) -> Operator:
    """What is known of it."""
    found = _OPERATORS.get(id(func))
    return _OPERATORS.setdefault(id(func), _read(func)) if found is None else found


def base_name(name: str) -> str:
    """The name by which the tables know an operator: ``_foreach_add_`` is ``add``, ``expand_copy`` is ``expand``."""
    if not name.startswith("__"):
        name = name.removesuffix("_")
    name = name.removeprefix("_foreach_")
    return name if name in CAST else name.removesuffix("_copy")


def _read(func: Any) -> Operator:
    described = dispatch_private.operation(func)
    base = base_name(described.name)
    written: set[int | str] = set()  # and returned
    tensors, types = [], []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {number, argument.name}
        if "Tensor" in str(argument.type):
            tensors.append(number)
        if "dtype" in argument.name:  # its type is int
            types.append(number)
    return Operator(
        func,
        str(func),
        base,
        _rounding(func, base),
        REDUCTION.get(base, ()),
        ACCUMULATE.get(base),
        frozenset(written | _UNSAID.get(base, frozenset())),
        bool(func.is_view),
        bool(func.is_view or written),
        zlib.crc32(str(func).encode()),
        tuple(tensors),
        tuple(types),
    )


def _rounding(func: Any, base: str) -> Rounding:
    if func.namespace in dispatch_private.COMMUNICATION:
        return "communication"
    if base in DRAW:
        return "draw"
    if base in CAST:
        return "cast"
    if base in CONSTANT:
        return "constant"
    if base in ("scatter", "put") and "reduce" in func._overloadname:
        return "reduction"
    if base == "round" and func._overloadname == "decimals":
        return "rounding"
    if base in EXACT or func.is_view:
        return "exact"
    return "reduction" if base in REDUCTION else "rounding"


_EIGHT_BITS: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
WIDE: Final[dict[torch.dtype, torch.dtype]] = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    **dict.fromkeys(
        (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz), torch.float64
    ),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
"""By type, the one in place of it where a run is raised."""
