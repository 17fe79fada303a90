"""Which modules of a user's own model become sharding units: those named, or the blocks that nearly every model has."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fsdpcheck.errors import UsageError


def chosen(build: str, model: nn.Module) -> tuple[str, ...]:
    """The children with parameters of the ModuleList or Sequential that holds most elements; none if there is none.

    A ModuleDict counts where they are all of one class, as blocks are and parts are not. Of equally large ones the
    outermost. Raises UsageError for a parameter that two of them share.
    """
    lists = [(name, module) for name, module in model.named_modules() if _is_list(module)]
    lists = [(name, module) for name, module in lists if len(_with_parameters(name, module)) > 1]
    if not lists:
        return ()
    largest = max(lists, key=lambda pair: sum(value.numel() for value in pair[1].parameters()))
    return named(build, model, _with_parameters(*largest))


def named(build: str, model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """``names``, if they can be units: modules with parameters, none inside another, none sharing with another.

    Raises UsageError naming the module or parameter.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in modules or not name:
            known = ", ".join(known for known in modules if known and list(modules[known].parameters()))
            raise UsageError(f"model {build!r} has no module {name!r} to shard; known: {known[:400]}")
        if not list(modules[name].parameters()):
            raise UsageError(f"module {name!r} of model {build!r} has no parameters to shard; leave it out of --units")
        inside = next((other for other in names if name.startswith(f"{other}.")), None)
        if inside is not None or names.count(name) > 1:
            raise UsageError(
                f"units of model {build!r} overlap: {name!r} is in {inside or name!r}; name each module once"
            )
    _require_unshared(build, model, names)
    return tuple(names)


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):
        return len({type(part) for part in module.values() if list(part.parameters())}) == 1
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _with_parameters(name: str, module: nn.Module) -> list[str]:
    prefix = f"{name}." if name else ""
    return [f"{prefix}{child}" for child, part in module.named_children() if list(part.parameters())]


def _require_unshared(build: str, model: nn.Module, names: Sequence[str]) -> None:
    """Sharding two modules apart would untie what they share."""
    places: dict[int, tuple[str, str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        unit = next((unit for unit in names if name.startswith(f"{unit}.")), "the root")
        first, where = places.setdefault(id(value), (name, unit))
        if where != unit:
            raise UsageError(
                f"units of model {build!r} share a parameter\n"
                f"  got     {first} in {where} is {name} in {unit}\n"
                f"  wanted  tied parameters within one unit: sharded apart they are no longer one\n"
                f"  next    name units that keep them together: --units"
            )
