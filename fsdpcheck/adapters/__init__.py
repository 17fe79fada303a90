"""Implementations under test, one a file; found by scanning this folder or by dotted name.

A *reference* to an adapter is a string: a built-in name ("fully_shard"), "pkg.mod:attr" or "file.py:attr". A string
crosses process borders and fits in a replay token. Nothing here imports torch before an adapter is loaded.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fsdpcheck.errors import AdapterError, excerpt, explain, spelling
from fsdpcheck.loading import references
from fsdpcheck.loading.references import canonical as canonical

if TYPE_CHECKING:
    from fsdpcheck.adapters.contract import Adapter, Features
    from fsdpcheck.adapters.declaration import Declaration

_FOLDER = Path(__file__).parent / "builtin"
_MAIN_JOB = ("fsdp1", "fully_shard", "reference", "reference_fsdp2")
_EXTRAS = {
    "accelerate": "accelerate", "deepspeed": "deepspeed", "lightning_fabric": "lightning", "opacus": "opacus",
    "opacus_ddp": "opacus", "torchtitan": "torchtitan",
}  # fmt: skip
"""Package, and adapter of that name -> extra of fsdpcheck that installs it."""
_KIND = references.Kind("adapter", AdapterError, _EXTRAS)
_loaded: dict[str, tuple[Adapter, Features]] = {}


@functools.cache
def names() -> tuple[str, ...]:
    """The built-in adapters, sorted: every module of builtin/ that does not start with an underscore."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.py") if not path.stem.startswith("_")))


def default_names() -> tuple[str, ...]:
    """The built-in adapters of the main job: they shard, and need nothing beyond fsdpcheck's own dependencies."""
    return _MAIN_JOB


def needs_extra(ref: str) -> bool:
    """Whether ``ref`` names a built-in adapter that needs a package beyond fsdpcheck's own dependencies."""
    return is_builtin(ref) and ref.partition(":")[0] in _EXTRAS


def variants(name: str) -> dict[str, str]:
    """The other adapters in a built-in's file: what each is named by ("opacus:sound"), and its own name.

    Raises what ``load`` raises.
    """
    module = references.imported(module_of(name), name, _KIND)
    found = {key: made for key, made in vars(module).items() if not key.startswith("_") and key != "adapter"}
    made = {
        key: one for key, one in found.items() if not isinstance(one, type) and callable(getattr(one, "build", None))
    }
    return {f"{name}:{key}": one.name for key, one in made.items()}


def module_of(name: str) -> str:
    """The dotted name of the module that holds a built-in adapter."""
    return f"{__name__}.builtin.{name}"


def files_of(name: str) -> list[Path]:
    """Those of a built-in adapter: what trains, where that is a module of its own, and what is promised of it."""
    return [path for path in (_FOLDER / f"_{name}.py", _FOLDER / f"{name}.py") if path.exists()]


def modules_of(ref: str) -> tuple[str, ...]:
    """The module of a built-in adapter, which may be imported before anything runs; none of a user's own."""
    return (module_of(ref.partition(":")[0]),) if is_builtin(ref) else ()


def is_builtin(ref: str) -> bool:
    """Whether ``ref`` names code of fsdpcheck itself; only such a name may come from a replay token."""
    name, _, variant = ref.partition(":")
    return name in names() and variant.isidentifier() == (":" in ref)


def load(ref: str) -> Adapter:
    """The adapter that ``ref`` names. The same reference gives the same object for the life of the process.

    Raises AdapterError (unknown name, failing import, missing method or features) or MissingDependency.
    """
    return _once(ref)[0]


def features(ref: str) -> Features:
    """What the adapter declares. Read once, when it is loaded: what is promised does not change while it is judged.

    Raises what ``load`` raises.
    """
    return _once(ref)[1]


def declared(ref: str) -> Declaration:
    """What the adapter declares, as plain data. Raises what ``load`` raises."""
    from fsdpcheck.adapters.declaration import declaration_of

    return declaration_of(*_once(ref))


def _once(ref: str) -> tuple[Adapter, Features]:
    key = canonical(ref)
    if key not in _loaded:
        from fsdpcheck.loading import import_patches

        with import_patches.recorded(key):
            _loaded[key] = _validated(ref, _found(key, ref))
    return _loaded[key]


def _found(key: str, ref: str) -> Any:
    target, colon, attr = key.rpartition(":")
    if not colon:
        return _builtin(ref)
    if target in names():
        return references.attribute(references.imported(module_of(target), target, _KIND), attr, ref, _KIND)
    found = references.load(f"{target}:{attr.partition(',')[0]}", _KIND)
    return _of_parts(found, target, attr, ref) if "," in attr or _parallelizes(found) else found


def _parallelizes(found: Any) -> bool:
    """Whether it is a function of a model and a mesh, and no adapter or what makes one."""
    if not inspect.isfunction(found):
        return False
    needed = [one for one in inspect.signature(found).parameters.values() if one.default is one.empty]
    return len([one for one in needed if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]) == 2


def _of_parts(parallelize: Any, target: str, attr: str, ref: str) -> Adapter:
    from fsdpcheck.adapters import user_parts

    words = user_parts.told(attr)
    functions: dict[str, Any] = {"parallelize": parallelize}
    for name in user_parts.FUNCTIONS:
        if name in words:
            functions[name] = references.load(f"{target}:{words[name]}", replace(_KIND, word=f"the {name} of adapter"))
    for name, function in functions.items():
        if not callable(function):
            got, wanted = f"{words[name]}, a {type(function).__name__}", "a function"
            raise AdapterError(explain(f"the {name} of adapter {ref!r}", got=got, wanted=wanted, then="name another"))
    shown = f"{Path(target).name}:{attr}" if target.endswith(".py") else ref
    return user_parts.adapter_of(shown, functions, words)


def _builtin(name: str) -> Any:
    if name not in names():
        if name.endswith(".py"):
            raise AdapterError(f"adapter {name!r} names no attribute of the file: wanted file.py:attr")
        raise AdapterError(
            f"unknown adapter {name!r}.{spelling.hint(name, names())} Known: {', '.join(names()) or 'none'}."
            " Your own is named pkg.mod:attr or file.py:attr."
        )
    return references.attribute(references.imported(module_of(name), name, _KIND), "adapter", name, _KIND)


def _validated(ref: str, found: Any) -> tuple[Adapter, Features]:
    from fsdpcheck.adapters.contract import Features, Observable, Promise, Trait
    from fsdpcheck.adapters.promises import require_consistent

    made = found
    if isinstance(found, type) or (callable(found) and not hasattr(found, "build")):
        try:
            made = found()
        except Exception as error:
            told = excerpt.said(error)
            raise AdapterError(f"adapter {ref!r}: {found!r} could not be called without arguments: {told}") from error
    if not callable(getattr(made, "build", None)):
        raise AdapterError(f"adapter {ref!r} ({type(made).__name__}) has no method build(model, setup) -> Trainer")
    declared = getattr(made, "features", None)
    if not isinstance(declared, Features):
        raise AdapterError(f"adapter {ref!r} has no features: Features(promises=..., accepts=...)")
    if not isinstance(getattr(made, "name", None), str):
        raise AdapterError(f"adapter {ref!r} has no name: str")
    adapter: Adapter = made
    _known(ref, "promises", declared.promises, get_args(Promise))
    _known(ref, "accepts", declared.accepts, get_args(Trait))
    _known(ref, "observables", declared.observables, get_args(Observable))
    _one_copy(ref, adapter)
    require_consistent(ref, adapter)
    return adapter, declared


def _one_copy(ref: str, adapter: Adapter) -> None:
    """An adapter's file is a module under a name of its own; by its file's name it would be imported a second time.

    What ranks swap then would be the globals of that second copy, which nothing reads.
    """
    home = sys.modules.get(type(adapter).__module__)
    for dotted in adapter.features.rank_local:
        module = dotted.partition(":")[0]
        if home is not None and home.__name__ != module and Path(str(getattr(home, "__file__", ""))).stem == module:
            raise AdapterError(
                f"adapter {ref!r}: Features.rank_local names another copy of the adapter's own file\n"
                f"  got     {dotted!r}, which is not the module that runs: {home.__name__}\n"
                f'  wanted  a name that follows the module: f"{{__name__}}:{dotted.partition(":")[2]}"'
            )


def _known(ref: str, field: str, words: Collection[str], known: Collection[str]) -> None:
    """A word nobody knows would be an unmade promise, so a slip of the pen would turn every law off and exit with 0."""
    if isinstance(words, str) or (unknown := sorted(set(words) - set(known))):
        got = words if isinstance(words, str) else unknown[0]
        raise AdapterError(
            f"adapter {ref!r}: Features.{field} holds {got!r}, wanted a set of: {', '.join(sorted(known))}."
            + spelling.hint(got, known)
        )
