"""The names of parameters: as the unwrapped root modules name them, the same whether and how they are wrapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from fsdpcheck.compat import layouts_private
from fsdpcheck.compat.layouts_private import FlatPart

_WRAPPED: Final = ("module", "_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""What wrappers call the one module that they wrap: DDP, Opacus, FSDP1, those of checkpoints and of torch.compile."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A parameter of the model, as one of an optimizer's: itself, or a part of the flat one that FSDP1 made of it."""

    parameter: Tensor
    part: FlatPart | None = None
    place: int = 0
    """Which of the parts of a flat parameter."""

    @property
    def key(self) -> tuple[int, int]:
        """By which it is looked up, as long as the parameter lives."""
        return id(self.parameter), self.place


class ParameterNames:
    """The root modules of a rank, and what their parameters are called.

    A root is what the script calls and nothing calls it in turn. Where a name is found in several roots that are
    trained, those are told apart by their classes, "Generator.fc.weight", of one class by numbers, "Net#2.fc.weight".
    Those of a pipeline's stages always are, by its number: pipeline_names.py makes them names of the whole model.
    """

    def __init__(self) -> None:
        self._roots: dict[nn.Module, dict[tuple[int, int], str]] = {}
        self._stages: dict[nn.Module, int] = {}
        self._flat: dict[int, tuple[Tensor, FlatPart]] = {}
        self._optimizers: dict[tuple[int, int], str] = {}
        self._alive: list[Tensor] = []

    def see(self, root: nn.Module, stage: int | None = None) -> None:
        """The script has called this module, or a pipeline has, whose stage of this number it is."""
        if root not in self._roots:
            self._roots[root] = {}
            if stage is not None:
                self._stages[root] = stage
            if not layouts_private.is_transformed():
                self.look(root)

    def look(self, only: nn.Module | None = None) -> None:
        """Look at what the roots have now; parameters may have been replaced."""
        for root, found in self._roots.items():
            if only is None or root is only:
                for path, subject, own in _parameters(root):
                    self._alive.append(own)
                    found.setdefault(subject.key, path)
                    if subject.part is not None and not subject.part.flat:
                        self._flat[id(own)] = own, subject.part

    def subjects(self, parameter: Tensor) -> list[Subject]:
        """What a parameter of an optimizer stands for: one, or many that FSDP1 has put into it."""
        if layouts_private.is_flat(parameter):
            parts = enumerate(layouts_private.parts_of(parameter))
            return [Subject(parameter, part, place) for place, part in parts]
        _, part = self._flat.get(id(parameter), (None, None))
        return [Subject(parameter, part)]

    def found(self) -> list[Subject]:
        """Each parameter of the roots that is not a part of a flat one."""
        roots = (subject for root in self._roots for _, subject, _ in _parameters(root) if subject.part is None)
        return list({subject.key: subject for subject in roots}.values())

    def call(self, subject: Subject, name: str) -> None:
        """What it is called where no root has it."""
        self._optimizers.setdefault(subject.key, name)

    def roots(self) -> dict[nn.Module, str]:
        """What to write before the names of each root: "" where all names are clear without, and for a stage."""
        inner = {part for root in self._roots for part in root.modules() if part is not root}
        roots = [root for root in self._roots if root not in inner]
        alone = [root for root in roots if root not in self._stages]
        trained = [root for root in alone if not self._optimizers.keys().isdisjoint(self._roots[root])]
        times = Counter(name for root in trained for name in {*self._roots[root].values()})
        shared = [root for root in trained if any(times[name] > 1 for name in self._roots[root].values())]
        prefixes, classes = dict.fromkeys(roots, ""), Counter[str]()
        for root in shared:
            kind = type(unwrapped(root)).__name__
            classes[kind] += 1
            prefixes[root] = f"{kind}." if classes[kind] == 1 else f"{kind}#{classes[kind]}."
        return prefixes

    def paths(self) -> dict[nn.Module, str]:
        """What stands before the names of each module's own parameters."""
        return {module: prefix + path for root, prefix in self.roots().items() for module, path in _modules(root)}

    def names(self) -> dict[tuple[int, int], str]:
        """What each parameter is called, by the key of its subject."""
        prefixes = self.roots()
        prefixes.update((root, f"stage {number}.") for root, number in self._stages.items() if root in prefixes)
        named = {key: prefix + path for root, prefix in prefixes.items() for key, path in self._roots[root].items()}
        return {**self._optimizers, **named}


def unwrapped(module: nn.Module) -> nn.Module:
    """What is left of a module without its wrappers."""
    while (inner := _wrapped(module)) is not None:
        module = module._modules[inner] or module
    return module


def _wrapped(module: nn.Module) -> str | None:
    """What a wrapper calls the module that it wraps: its only one, beside which it has no parameters."""
    names = list(module._modules)
    is_wrapper = len(names) == 1 and names[0] in _WRAPPED and all(p is None for p in module._parameters.values())
    return names[0] if is_wrapper and module._modules[names[0]] is not None else None


def _modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str]]:
    """Each module with what stands before the names of its own parameters: its path without wrappers."""
    yield module, prefix
    inner = _wrapped(module)
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, prefix if name == inner else f"{prefix}{name}.")


def _parameters(root: nn.Module) -> Iterator[tuple[str, Subject, Tensor]]:
    """Each parameter: its path without wrappers, how it is looked up, and itself; one that is tied several times."""
    for module, prefix in _modules(root):
        yield from _own_parameters(module, prefix)


def _own_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, Subject, Tensor]]:
    flat = layouts_private.flat_parameter_of(module)
    if flat is not None:
        originals = layouts_private.originals_of(flat)
        for place, part in enumerate(layouts_private.parts_of(flat)):
            own = originals[place] if originals else flat
            yield prefix + _clean(part.name), Subject(own, part, place if part.flat else 0), own
    for name, parameter in module._parameters.items():
        if parameter is not None and not layouts_private.is_flat(parameter):
            yield prefix + name, Subject(parameter), parameter


def _clean(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPED[1:])
