"""Implementations under test, one a file; found by scanning this folder or by dotted name.

A *reference* to an adapter is a string: a built-in name ("fully_shard"), "pkg.mod:attr" or "file.py:attr". A string
crosses process borders and fits in a replay token. Nothing here imports torch before an adapter is loaded.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

from fsdpcheck.errors import AdapterError, MissingDependency

if TYPE_CHECKING:
    from fsdpcheck.adapters._base import Adapter

_FOLDER = Path(__file__).parent
_EXTRAS = {"opacus": "opacus"}  # package (and adapter of that name) -> extra of fsdpcheck that installs it
_loaded: dict[str, Adapter] = {}


def names() -> tuple[str, ...]:
    """The built-in adapters, sorted: every module of this folder that does not start with an underscore."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.py") if not path.stem.startswith("_")))


def default_names() -> tuple[str, ...]:
    """The built-in adapters that need nothing beyond fsdpcheck's own dependencies: the main job."""
    return tuple(name for name in names() if name not in _EXTRAS)


def is_builtin(ref: str) -> bool:
    """Whether ``ref`` names code of fsdpcheck itself; only such a name may come from a replay token."""
    name, _, variant = ref.partition(":")
    return name in names() and variant.isidentifier() == (":" in ref)


def canonical(ref: str) -> str:
    """``ref`` with the path of "file.py:attr" made absolute, so that it means the same in every working directory."""
    target, colon, attr = ref.rpartition(":")
    return f"{Path(target).expanduser().resolve()}:{attr}" if colon and target.endswith(".py") else ref


def load(ref: str) -> Adapter:
    """The adapter that ``ref`` names. The same reference gives the same object for the life of the process.

    Raises AdapterError (unknown name, failing import, missing method or features) or MissingDependency.
    """
    key = canonical(ref)
    if key not in _loaded:
        _loaded[key] = _validated(ref, _found(key, ref))
    return _loaded[key]


def _found(key: str, ref: str) -> Any:
    target, colon, attr = key.rpartition(":")
    if not colon:
        return _builtin(ref)
    if not target or not attr:
        raise AdapterError(f"adapter {ref!r} is not of the form pkg.mod:attr or file.py:attr")
    if target in names():
        return _attribute(_imported(f"{__name__}.{target}", target), attr, ref)
    module = _file_module(Path(target), ref) if target.endswith(".py") else _dotted_module(target, ref)
    return _attribute(module, attr, ref)


def _builtin(name: str) -> Any:
    if name not in names():
        if name.endswith(".py"):
            raise AdapterError(f"adapter {name!r} names no attribute of the file: wanted file.py:attr")
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise AdapterError(
            f"unknown adapter {name!r}.{hint} Known: {', '.join(names()) or 'none'}."
            " Your own is named pkg.mod:attr or file.py:attr."
        )
    return _attribute(_imported(f"{__name__}.{name}", name), "adapter", name)


def _dotted_module(dotted: str, ref: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; the console script does not
    return _imported(dotted, ref)


def _file_module(path: Path, ref: str) -> ModuleType:
    name = f"fsdpcheck_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise AdapterError(f"adapter {ref!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AdapterError(f"adapter {ref!r}: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that a file beside it shadows nothing
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_error(error, ref, name) from error
    return module


def _imported(dotted: str, ref: str) -> ModuleType:
    try:
        return importlib.import_module(dotted)
    except (Exception, SystemExit) as error:
        raise _import_error(error, ref, dotted) from error


def _import_error(error: BaseException, ref: str, dotted: str) -> AdapterError:
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    if missing and dotted != missing and not dotted.startswith(f"{missing}."):
        package = missing.partition(".")[0]
        what = f"'fsdpcheck[{_EXTRAS[package]}]'" if package in _EXTRAS else package
        return MissingDependency(f"adapter {ref!r} needs {missing!r}, which is not installed: pip install {what}")
    if missing:
        return AdapterError(f"adapter {ref!r}: no module {missing!r} on the import path (working folder: {Path.cwd()})")
    return AdapterError(f"adapter {ref!r} cannot be imported: {type(error).__name__}: {error}")


def _attribute(module: ModuleType, attr: str, ref: str) -> Any:
    try:
        return getattr(module, attr)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        close = difflib.get_close_matches(attr, public, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise AdapterError(f"adapter {ref!r}: {module.__file__} has no {attr!r}.{hint}") from None


def _validated(ref: str, found: Any) -> Adapter:
    from fsdpcheck.adapters._base import Features, Promise, Trait
    from fsdpcheck.execution import Observable

    made = found
    if isinstance(found, type) or (callable(found) and not hasattr(found, "build")):
        try:
            made = found()
        except Exception as error:
            raise AdapterError(f"adapter {ref!r}: {found!r} could not be called without arguments: {error}") from error
    if not callable(getattr(made, "build", None)):
        raise AdapterError(f"adapter {ref!r} ({type(made).__name__}) has no method build(model, setup) -> Trainer")
    if not isinstance(getattr(made, "features", None), Features):
        raise AdapterError(f"adapter {ref!r} has no features: Features(promises=..., accepts=...)")
    if not isinstance(getattr(made, "name", None), str):
        raise AdapterError(f"adapter {ref!r} has no name: str")
    adapter: Adapter = made
    _known(ref, "promises", adapter.features.promises, get_args(Promise))
    _known(ref, "accepts", adapter.features.accepts, get_args(Trait))
    _known(ref, "observables", adapter.features.observables, get_args(Observable))
    _one_copy(ref, adapter)
    return adapter


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
        close = difflib.get_close_matches(got, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise AdapterError(
            f"adapter {ref!r}: Features.{field} holds {got!r}, wanted a set of: {', '.join(sorted(known))}.{hint}"
        )
