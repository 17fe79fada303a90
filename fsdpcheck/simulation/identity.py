"""What a call is about, of any program: the parameter, gradient or buffer that travels, the module and phase.

Nothing is announced: modules are seen when they register parameters and submodules, tensors are known by their memory,
the module and phase by the call stack. Names begin at a root module, one that is part of no other: its class, numbered
where a rank has several.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from fsdpcheck.compat import frames_private, torch_private

_SAME_EVERYWHERE = frozenset({"all_reduce", "reduce", "broadcast", "reduce_scatter"})
"""Calls whose members give the same thing each; an all_gather may well put different whole parameters together."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What one call is about; "" for what is not known.

    ``tensor``: "Net.fc.weight" or "gradient of Net.fc.weight". ``module``: the innermost whose forward makes the call.
    ``phase``: "forward", "backward" or "step". ``is_part``: of the parameter, a shard of it say.
    """

    tensor: str = ""
    module: str = ""
    phase: str = ""
    is_part: bool = False

    @property
    def place(self) -> str:
        """Module and phase in words."""
        return f"{self.phase} of {self.module}" if self.phase and self.module else self.phase

    def differs(self, other: Identity, mine: Names, theirs: Names) -> bool:
        """Whether the two cannot be meant to meet: different names, each of which either rank has."""
        pairs = ((self.tensor, other.tensor), (self.module, other.module))
        one, two = next((pair for pair in pairs if all(pair)), ("", ""))
        return one != two and all(names.has(name) for names in (mine, theirs) for name in (one, two))


_Entry = tuple[str, "ReferenceType[Tensor]"]
NOTHING_KNOWN = Identity()


class Names:
    """The modules and parameters of one rank, and their names."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._fresh = False
        self._parameters: dict[tuple[int, torch.dtype], list[_Entry]] = {}
        self._next: dict[tuple[int, torch.dtype], int] = {}
        self._storages: dict[int, tuple[str, ReferenceType[Tensor]]] = {}
        self._modules: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._all: set[str] = set()

    @contextmanager
    def told(self) -> Iterator[None]:
        """While open, what this thread's modules register is seen."""
        handles = (
            hooks.register_module_parameter_registration_hook(lambda module, name, parameter: self._see(module)),
            hooks.register_module_module_registration_hook(lambda module, name, inner: self._see(module)),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def has(self, name: str) -> bool:
        """Whether a parameter or module of this rank has this name; a gradient is its parameter's.

        A parameter without memory is not here: it lies on another rank, where ranks have parts of a flat parameter.
        """
        return name.removeprefix("gradient of ") in self._all

    def identify(self, tensors: Sequence[Tensor], frame: FrameType | None) -> Identity:
        """What a call with these tensors, made in this frame, is about."""
        module, phase = self._inside(frame)
        if not self._fresh:
            self._name_all()
        name, is_part = self._name_of(tensors[0]) if len(tensors) == 1 and not tensors[0].is_sparse else ("", False)
        return Identity(name, self._modules.get(module, "") if module is not None else "", phase, is_part)

    def forget(self) -> None:
        """Drop the references to parameters; they are found anew."""
        self._fresh = False
        self._parameters, self._storages = {}, {}

    def _see(self, module: nn.Module) -> None:
        self._seen.setdefault(module, None)
        self._fresh = False

    def _inside(self, frame: FrameType | None) -> tuple[nn.Module | None, str]:
        """The innermost module on the stack, and the phase."""
        module, phase = None, "backward" if torch_private.is_in_backward() else ""
        while frame is not None:
            found = frames_private.module_called(frame)
            if found is not None:
                module = module or found
                phase = phase or "forward"
            phase = phase or ("step" if frames_private.is_step_of_optimizer(frame) else "")
            frame = frame.f_back
        return module, phase

    def _name_all(self) -> None:
        self._fresh = True
        by_size: dict[tuple[int, torch.dtype], list[_Entry]] = defaultdict(list)
        self._modules, classes = WeakKeyDictionary(), Counter[str]()
        self._storages, here = {}, set[str]()
        inner = {part for module in self._seen for part in module.children()}
        for root in [module for module in self._seen if module not in inner]:
            name = type(root).__name__
            classes[name] += 1
            name = name if classes[name] == 1 else f"{name}#{classes[name]}"
            for path, module in root.named_modules():
                self._modules[module] = f"{name}.{path}" if path else name
            for path, parameter in (*root.named_parameters(), *root.named_buffers()):
                own = torch_private.own_part(parameter)
                by_size[own.numel(), own.dtype].append((f"{name}.{path}", ref(parameter)))
                self._storages[own.untyped_storage()._cdata] = f"{name}.{path}", ref(parameter)
                if own.is_meta or own.untyped_storage().nbytes():
                    here.add(f"{name}.{path}")
        self._parameters = dict(by_size)
        self._next = dict.fromkeys(by_size, 0)
        self._all = here | set(self._modules.values())

    def _name_of(self, tensor: Tensor) -> tuple[str, bool]:
        """The parameter or buffer whose memory, or gradient's, this is, and whether it is only a part of it.

        Looked for from where the last one was found."""
        key = tensor.numel(), tensor.dtype
        entries, first = self._parameters.get(key, []), self._next.get(key, 0)
        shared = torch_private.shares_storage(tensor)
        for place in range(len(entries)):
            number = (first + place) % len(entries)
            name, parameter = entries[number][0], entries[number][1]()
            if parameter is None:
                continue
            own, gradient = torch_private.own_part(parameter), parameter.grad
            of_gradient = gradient is tensor or (shared and _is_same_memory(gradient, tensor))
            if of_gradient or own is tensor or (shared and _is_same_memory(own, tensor)):
                self._next[key] = number + 1
                return f"gradient of {name}" if of_gradient else name, own is not parameter
        return self._whose_storage(tensor) if shared else ("", False)

    def _whose_storage(self, tensor: Tensor) -> tuple[str, bool]:
        """The parameter of which a tensor is a view."""
        storage = tensor.untyped_storage()._cdata
        name, reference = self._storages.get(storage, ("", None))
        parameter = reference() if reference is not None else None
        if parameter is None or torch_private.own_part(parameter).untyped_storage()._cdata != storage:
            return "", False
        return name, True


@contextmanager
def copies_seen(names: Callable[[], Names | None]) -> Iterator[None]:
    """While open, modules that are copied or unpickled, which register nothing, are seen by the rank's ``names``."""
    take = nn.Module.__setstate__

    def take_and_tell(module: nn.Module, state: Any) -> None:
        take(module, state)  # type: ignore[no-untyped-call]
        mine = names()
        if mine is not None:
            mine._see(module)

    with torch_private.replaced(nn.Module, __setstate__=take_and_tell):
        yield


def _is_same_memory(one: Tensor | None, other: Tensor) -> bool:
    if one is None or one.is_sparse:
        return False
    own = torch_private.own_part(one)
    return type(own) in (Tensor, nn.Parameter) and own.data_ptr() == other.data_ptr() != 0


def crossed(op: str, found: Mapping[int, Identity], names: Mapping[int, Names]) -> bool:
    """Whether members of a call, by rank, give different things where each rank has all of them."""
    gathers_parts = op == "all_gather" and all(identity.is_part for identity in found.values())
    if op not in _SAME_EVERYWHERE and not gathers_parts:
        return False
    (first, one), *others = found.items()
    return any(one.differs(other, names[first], names[rank]) for rank, other in others)
