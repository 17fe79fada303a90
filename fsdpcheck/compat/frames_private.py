"""Frames of a call stack: whose code they run, and what of torch's own frames tells what a call is about.

Tried: 2.13.0 unless a line says otherwise.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import torch

SUBJECT_LOCALS = ("self", "handle", "unit")
"""Names of local variables worth giving to ``subject_of`` when a call stack is walked from a collective outwards.

The reference passes the ``unit`` whose data travels to plain functions (impl/sharding/collectives.py).
FSDP2 gathers and reduces inside methods of FSDPParamGroup; FSDP1 gathers inside methods of FlatParamHandle but reduces
inside the free function ``_runtime_utils._reduce_grad(state, handle)``. Tried: 2.13.0.
"""


ROOT = "(root)"
"""Subject of the root unit, whose fully-qualified name is the empty string."""


def subject_of(frame_self: object) -> str | None:
    """Name of the sharding unit that ``frame_self`` stands for; None when it is no unit or does not know its name.

    Understood: any object with a str attribute ``fqn`` (an implementation's own unit); FSDP2's ``FSDPParamGroup``
    (``_module_fqn``: None before the lazy init of the root, "" for the root); FSDP1's ``FlatParamHandle`` (its place in
    the root's order, because its parameter names are relative to the unit and so equal for equal units).
    Never raises and never runs ``__getattr__`` hooks of modules. Tried: 2.13.0.
    """
    own = _attribute(frame_self, "fqn")
    if isinstance(own, str):
        return own or ROOT
    match type(frame_self).__name__:
        case "FSDPParamGroup":
            name = _attribute(frame_self, "_module_fqn")
            return None if name is None else str(name) or ROOT
        case "FlatParamHandle":
            return _flat_handle(frame_self)
    return None


def _flat_handle(handle: object) -> str | None:
    flat = _attribute(handle, "flat_param")
    names = getattr(flat, "_fqns", None)
    if names is None:
        return None
    place = _attribute(handle, "_handle_index")
    where = "" if place is None else f"unit {place}: "
    return where + ", ".join(names)


def _attribute(thing: object, name: str) -> Any:
    """``thing.name`` from its own dict, slots or class; no user-defined __getattr__ runs. None when absent."""
    try:
        return object.__getattribute__(thing, name)
    except Exception:  # a property of the implementation may raise anything
        return None


_TORCH = str(Path(torch.__file__).parent) + os.sep


_UNITS = (os.path.join("distributed", "fsdp", ""), os.path.join("distributed", "_composable", ""))


_OURS = str(Path(__file__).parent.parent) + os.sep


_TRITON = tuple(
    folder + os.sep for folder in getattr(PathFinder.find_spec("triton"), "submodule_search_locations", None) or ()
)
"""Its own folder, for its interpreter runs kernels; found on the path, for a stub in its place has no spec."""


_STANDARD = str(Path(os.__file__).parent) + os.sep


_GLUE = "typing_extensions.py"


_IMPLEMENTATIONS = tuple(_OURS + name + os.sep for name in ("impl", "adapters"))


def is_plumbing(filename: str) -> bool:
    """Whether a file is no part of an implementation: torch but its FSDP, the harness, Triton, Python's own."""
    if filename.startswith(_TORCH):
        return not any(part in filename for part in _UNITS)
    if is_harness(filename) or filename.startswith(_TRITON):
        return True
    return filename.startswith("<") or filename.endswith(_GLUE) or _is_standard_library(filename)


def folders_of_units() -> list[str]:
    """Globs of torch's own folders that are part of an implementation."""
    return [f"{_TORCH}{folder}*" for folder in _UNITS]


def lines_of(frame: FrameType | None, most: int) -> tuple[str, ...]:
    """ "file:line function" of the innermost frames of an implementation, innermost first."""
    found: list[str] = []
    while frame is not None and len(found) < most:
        code = frame.f_code
        if not is_plumbing(code.co_filename):
            found.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(found)


def is_torch(filename: str) -> bool:
    """Whether a file is torch's own."""
    return filename.startswith(_TORCH)


def is_a_program(filename: str) -> bool:
    """Whether a file is none of Python's, torch's or the harness's; torch's own tests are programs."""
    return not is_plumbing(filename) or filename.startswith(_TORCH + "testing" + os.sep)


def is_asked_by_a_program(frame: FrameType | None, through: CodeType | None = None) -> bool:
    """Whether the innermost caller that is neither the harness nor Python's own is a program, and not torch.

    ``through``: the code of a function of torch whose caller counts instead."""
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code is through:
            through = None
        elif is_torch(file) or is_a_program(file):
            return not is_torch(file)
        frame = frame.f_back
    return False


def is_ours(filename: str) -> bool:
    """Whether a file is part of fsdpcheck, the reference implementation and the built-in adapters included."""
    return filename.startswith(_OURS)


def is_harness(filename: str) -> bool:
    """Whether a file is the harness itself, and neither the reference implementation nor an adapter."""
    return filename.startswith(_OURS) and not filename.startswith(_IMPLEMENTATIONS)


def _is_standard_library(filename: str) -> bool:
    return filename.startswith(_STANDARD) and "site-packages" not in filename


_GROUPS = (os.path.join("distributed", "distributed_c10d.py"), os.path.join("distributed", "rendezvous.py"))


def is_called_to_make_groups(frame: FrameType | None) -> bool:
    """Whether a store is used by what makes process groups: its innermost caller that is not the harness.

    Tried: 2.13.0; read in 2.11.0 and 2.12.0.
    """
    while frame is not None and is_harness(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_torch(frame.f_code.co_filename) and frame.f_code.co_filename.endswith(_GROUPS)


def is_called_to_wait(frame: FrameType | None) -> bool:
    """Whether a message is sent or received by dist.send or dist.recv, which wait for it. Tried: 2.13.0."""
    while frame is not None and is_harness(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and is_torch(frame.f_code.co_filename):
        if frame.f_code.co_name in ("send", "recv"):
            return True
        frame = frame.f_back
    return False


_PYTHON_OF_GROUPS = tuple(os.path.join("distributed", name) for name in ("distributed_c10d.py", "c10d_logger.py"))


_FUNCTIONAL = tuple(
    os.path.join("torch", *path)
    for path in (("distributed", "_functional_collectives.py"), ("_ops.py",), ("_library", "autograd.py"))
)


def asked_directly(frame: FrameType | None, *, functional: bool = False) -> str:
    """file:line of who has called torch.distributed, unless that is torch itself; then "". Tried: 2.13.0.

    ``functional``: or a functional collective.
    """
    between = (*_PYTHON_OF_GROUPS, *_FUNCTIONAL) if functional else _PYTHON_OF_GROUPS
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.endswith(between) and (is_torch(file) or not is_plumbing(file)):
            break
        frame = frame.f_back
    if frame is None or is_torch(frame.f_code.co_filename):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def module_called(frame: FrameType) -> torch.nn.Module | None:
    """The module whose call this frame is; None where it is another frame. Tried: 2.13.0."""
    if frame.f_code is not torch.nn.Module._call_impl.__code__:
        return None
    return cast(torch.nn.Module, frame.f_locals["self"])


def is_step_of_optimizer(frame: FrameType) -> bool:
    """Whether this frame is an optimizer's step."""
    return frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)


def keywords_of_call(frame: FrameType | None) -> dict[str, Any]:
    """The keyword arguments of the module's call that runs a hook, by a frame of the hook; {} where it is not found.

    Hooks on all modules are not given them before the forward. Tried: 2.13.0.
    """
    while frame is not None and is_harness(frame.f_code.co_filename):
        frame = frame.f_back
    found = None if frame is None or frame.f_code.co_name != "inner" else frame.f_locals.get("kwargs")
    return found if isinstance(found, dict) else {}


_SHAPES = ("_forward_metadata_inference", "_shape_inference")


def is_called_for_shapes(frame: FrameType | None) -> bool:
    """Whether a pipeline calls a stage to learn the shapes of what it returns. Tried: 2.13.0; read in 2.11.0."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    while frame is not None:
        if frame.f_code.co_name in _SHAPES and is_torch(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


_WARMING = ("_initialize_stage", "_initialize_stages", "_warmup_p2p")


def warms_a_pipeline_up(frame: FrameType | None) -> bool:
    """Whether a pipeline opens its connections: by messages that nobody reads, which a stage in the middle receives
    from both sides into one buffer. So does each schedule of 2.11.0, and that of 2.13.0 for other stages than torch's.
    """
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    while schedules is not None and frame is not None:
        if frame.f_code.co_filename == schedules.__file__ and frame.f_code.co_name == "_batch_p2p":
            return frame.f_back is not None and frame.f_back.f_code.co_name in _WARMING
        frame = frame.f_back
    return False


def stage_called(frame: FrameType | None) -> int | None:
    """Which stage of a pipeline, by its number, runs the innermost call of this stack; None outside. Tried: 2.13.0."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    while pipelining is not None and frame is not None:
        if frame.f_code.co_filename == pipelining.__file__:
            number = _attribute(frame.f_locals.get("self"), "stage_index")
            if isinstance(number, int):
                return number
        frame = frame.f_back
    return None
