"""A case as text: strict, versioned JSON. Used by cases alone."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import TYPE_CHECKING, Any, NoReturn

from fsdpcheck.case.refusal import refuse
from fsdpcheck.errors import InvalidCase

if TYPE_CHECKING:
    from fsdpcheck.case.training import TrainingCase

VERSION = 2

_LONGEST = 1 << 20
"""Characters of the longest text that is looked at."""


_LATER: dict[str, dict[str, Any]] = {
    "ModelSpec": {"own": None, "bags": "sum", "bare_units": False},
    "LayerSpec": {"used": "once", "heads": 0, "same": False, "padding_mode": "zeros", "mask": "none"},
    "UserModelSpec": {"names": "", "gauge": True, "optimizer": ""},
    "MeshSpec": {"axes": (), "goes_on_at": 0},
    "BatchLayout": {"lists": ()},
    "StepSpec": {
        "noise_multiplier": 0.0,
        "clip_groups": "all",
        "evaluates": "no",
        "rebuilds": False,
        "thaws": False,
        "refreezes": False,
        "unequal": False,
        "secure_noise": False,
        "across": "nothing",
    },
    "OptimizerSpec": {"groups": "one"},
    "Arithmetic": {"compute": "dtype", "world_factors": 1},
}
"""Fields, by the class they are in, that came after version 2 was frozen: written only where they differ from this."""


def encode(case: TrainingCase, **beside: object) -> str:
    """The case as one line of JSON, every field written out but later ones that say nothing; then ``beside``."""
    data = dataclasses.asdict(case)
    parts = [(data[key], getattr(case, key)) for key in ("model", "mesh", "layout", "step", "arithmetic")]
    parts += [(data["model"]["own"], case.model.own)] if case.model.own is not None else []
    parts += zip(data["model"]["layers"], case.model.layers, strict=True)
    parts += [(data["step"]["optimizer"], case.step.optimizer)]
    for own, part in parts:
        for name, default in _LATER[type(part).__name__].items():
            if own[name] == default:
                del own[name]
    return json.dumps({"version": VERSION, **data, **beside}, separators=(",", ":"), allow_nan=False)


def read(text: str) -> dict[str, Any]:
    """The fields of a case that is one line of JSON, still plain data. Raises InvalidCase for any other text."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        refuse("the text", "not a string, or a very long one", f"a string of at most {_LONGEST} characters")
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidCase(f"the case: got text that is no JSON ({error}); was it cut short? copy it whole") from None
    if not isinstance(data, dict) or type(data.get("version")) is not int:
        refuse("the case", type(data).__name__ + " without a version", f'an object with "version": {VERSION}')
    found = data.pop("version")
    if found != VERSION:
        refuse("the case's version", found, f"{VERSION}, the one this release reads; use a matching release")
    return data


def value(kind: Any, data: Any, where: str) -> Any:
    """Plain ``data`` as a value of the annotated type ``kind``. Raises InvalidCase naming the field; runs nothing."""
    if dataclasses.is_dataclass(kind):
        return _object(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        if type(data) is not str or data not in arguments:
            refuse(where, data, f"one of {', '.join(arguments)}")
        return data
    if origin is types.UnionType and types.NoneType not in arguments:
        if type(data) not in arguments or (type(data) is float and not math.isfinite(data)):
            refuse(where, data, "a finite number")
        return data
    if origin is types.UnionType:
        return None if data is None else value(arguments[0], data, where)
    if origin is tuple:
        return _tuple(arguments, data, where)
    if type(data) is not kind or (kind is float and not math.isfinite(data)):
        refuse(where, data, f"a value of type {kind.__name__}")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _object(kind: Any, data: Any, where: str) -> Any:
    fields = typing.get_type_hints(kind)
    if not isinstance(data, dict):
        refuse(where, data, "an object")
    later = _LATER.get(kind.__name__, {}).keys()
    if data.keys() | later != fields.keys():
        unknown, missing = sorted(data.keys() - fields.keys()), sorted(fields.keys() - data.keys() - later)
        refuse(where, f"unknown keys {unknown}, missing keys {missing}", f"exactly {', '.join(fields)}")
    return kind(**{name: value(fields[name], data[name], f"{where}.{name}") for name in fields if name in data})


def _tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        refuse(where, data, "a list")
    kinds = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(data):
        refuse(where, data, f"a list of {len(kinds)}")
    return tuple(value(kinds[index], item, f"{where}[{index}]") for index, item in enumerate(data))
