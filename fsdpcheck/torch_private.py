"""The one home of everything private in torch that the project touches, with the releases each was tried on.

Nothing here is imported at module level from torch's private modules: a name that moved must break the one function
that needs it, with its message, and not the import of the package. Tried: 2.13.0 unless a line says otherwise.
"""

from __future__ import annotations

from typing import Any

SUBJECT_LOCALS = ("self", "handle")
"""Names of local variables worth giving to ``subject_of`` when a call stack is walked from a collective outwards.

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
    except AttributeError:
        return None
