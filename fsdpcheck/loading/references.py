"""References: a user's object as a string, "pkg.mod:attr" or "file.py:attr", which crosses process borders.

A file is imported as a module under a name of its own, once in a process. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from fsdpcheck.errors import MissingDependency, UsageError, excerpt, explain, spelling

_OTHERS: Final = (str(Path(__file__).parent.parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
"""Where code lies that is no user's own: fsdpcheck, Python, and what is installed."""

FILE: Final = "fsdpcheck_file_"
"""How the names of modules begin that are a user's files."""


@dataclass(frozen=True)
class Kind:
    """What a reference stands for, in messages ("adapter"), and the error raised when it cannot be had.

    ``extras``: package -> extra of fsdpcheck that installs it.
    """

    word: str
    error: type[UsageError] = UsageError
    extras: Mapping[str, str] = field(default_factory=dict)


def canonical(ref: str, folder: str = "") -> str:
    """``ref`` with the path of "file.py:attr" made absolute, so that it means the same in every working directory.

    ``folder``: what it is relative to, the working directory by default.
    """
    target, colon, attr = ref.rpartition(":")
    is_file = colon and target.endswith(".py")
    return f"{Path(folder, Path(target).expanduser()).resolve()}:{attr}" if is_file else ref


def load(ref: str, kind: Kind) -> Any:
    """What ``ref`` names. Raises ``kind.error`` (form, import, no such attribute) or MissingDependency."""
    target, colon, attr = canonical(ref).rpartition(":")
    if not colon or not target or not attr:
        raise kind.error(f"{kind.word} {ref!r} is not of the form pkg.mod:attr or file.py:attr")
    module = _file_module(Path(target), ref, kind) if target.endswith(".py") else _dotted_module(target, ref, kind)
    return attribute(module, attr, ref, kind)


def module(name: str, kind: Kind) -> ModuleType:
    """The module "pkg.mod" or "file.py". Raises as ``load`` does."""
    path = Path(name).expanduser().resolve()
    return _file_module(path, name, kind) if name.endswith(".py") else _dotted_module(name, name, kind)


def imported(dotted: str, ref: str, kind: Kind) -> ModuleType:
    """The module ``dotted``; an import that fails is a ``kind.error`` that says why."""
    try:
        return importlib.import_module(dotted)
    except (Exception, SystemExit) as error:
        raise _import_error(error, ref, dotted, kind) from error


def attribute(module: ModuleType, attr: str, ref: str, kind: Kind) -> Any:
    """``module.attr``, or a ``kind.error`` with the nearest name."""
    try:
        return getattr(module, attr)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise kind.error(
            f"{kind.word} {ref!r}: {module.__file__} has no {attr!r}.{spelling.hint(attr, public)}"
        ) from None


def _dotted_module(dotted: str, ref: str, kind: Kind) -> ModuleType:
    is_ours = dotted.partition(".")[0] == "fsdpcheck"  # a probe that a rank loads: nothing changes there
    if not is_ours and "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; the console script does not
    return imported(dotted, ref, kind)


def _file_module(path: Path, ref: str, kind: Kind) -> ModuleType:
    name = f"{FILE}{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise kind.error(f"{kind.word} {ref!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise kind.error(f"{kind.word} {ref!r}: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    if str(path.parent) not in sys.path:
        sys.path.insert(_before_packages(), str(path.parent))
    before = sys.modules.copy()
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_error(error, ref, name, kind) from error
    _require_from_beside(path, ref, kind, (sys.modules.keys() - before.keys()) | _named_in(path))
    return module


def _named_in(path: Path) -> set[str]:
    """What a file's own text imports, in its functions too: modules that lie beside it, or anywhere."""
    named = set()
    for node in ast.walk(ast.parse(path.read_bytes(), path)):
        if isinstance(node, ast.Import):
            named |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named.add(node.module.partition(".")[0])
    return named


def _require_from_beside(path: Path, ref: str, kind: Kind, imported: Iterable[str]) -> None:
    """Raise what ``kind`` raises if one of ``imported`` lies beside ``path`` and came from elsewhere.

    As by PYTHONPATH, or by another file's import of a name that both have beside them: another's code would be judged.
    Python's own modules come before a file of their name, and are meant; and fsdpcheck is the one that runs.
    """
    meant = {*sys.stdlib_module_names, "fsdpcheck"}
    for name in sorted(each for each in imported if "." not in each and each not in meant):
        here = [each for each in (path.parent / f"{name}.py", path.parent / name / "__init__.py") if each.is_file()]
        came = _origin(name) if here else None
        if came is not None and os.path.realpath(came) not in map(os.path.realpath, here):
            raise kind.error(
                explain(
                    f"{kind.word} {ref!r} imports another {name} than lies beside it",
                    got=came,
                    wanted=here[0],
                    then="take the other's folder off the import path (PYTHONPATH), or name one of the two otherwise",
                )
            )


def _origin(name: str) -> str | None:
    """The file of a module that is imported, or that an import would find."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None)
    found = importlib.util.find_spec(name)
    return found.origin if found is not None and found.has_location else None


def _before_packages() -> int:
    """The place on the import path behind Python's own modules, which a file beside an adapter must not shadow.

    And before installed packages: of a library that is installed too, the copy beside the adapter is meant.
    """
    names = ("site-packages", "dist-packages")
    return next((at for at, folder in enumerate(sys.path) if Path(folder).name in names), len(sys.path))


def _import_error(error: BaseException, ref: str, dotted: str, kind: Kind) -> UsageError:
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    if missing.startswith("fsdpcheck."):  # the message says where it has moved to
        return kind.error(f"{kind.word} {ref!r} cannot be imported: {error}{_place(error)}")
    if missing and dotted != missing and not dotted.startswith(f"{missing}."):
        package = missing.partition(".")[0]
        what = f"needs {missing!r}, which is not installed"
        if package in kind.extras:
            return MissingDependency(f"{kind.word} {ref!r} {what}: pip install 'fsdpcheck[{kind.extras[package]}]'")
        installed = metadata.packages_distributions()
        own = _importing(error) not in installed  # what is installed misspells no import
        meant = spelling.hint(package, {*sys.stdlib_module_names, *installed}) if own else ""
        then = f".{meant}" if meant else f"; if that is a package: pip install {package}"
        return MissingDependency(f"{kind.word} {ref!r} {what}{then}{_place(error)}")
    if missing:
        here = Path.cwd()
        return kind.error(f"{kind.word} {ref!r}: no module {missing!r} on the import path (working folder: {here})")
    what = f"{excerpt.kind(error)}: {excerpt.said(error)}"
    return kind.error(f"{kind.word} {ref!r} cannot be imported: {what}{_place(error)}")


def _importing(error: BaseException) -> str:
    """The package, or the module, that has the import that failed."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [name for name in frames if name.partition(".")[0] != "importlib"]
    return str(own[-1]).partition(".")[0] if own else ""


def _place(error: BaseException) -> str:
    """A line that says where the user's own code raised, and what stands there; "" where nothing of it was running."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"\n  where   {error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(("<", _OTHERS[0]))]
    theirs = [frame for frame in outside if not frame.filename.startswith(_OTHERS)] or outside
    if not theirs:
        return ""
    return f"\n  where   {theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}"
