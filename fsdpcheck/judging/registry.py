"""Registry: ``@law`` makes a law of a function, a pytest test and an entry that the command line reads."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, get_args

from fsdpcheck.adapters.contract import Features, Observable, Promise, Trait
from fsdpcheck.errors import AdapterError, UsageError, explain
from fsdpcheck.judging import coverage
from fsdpcheck.judging.law import Law
from fsdpcheck.loading import references, registered

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from fsdpcheck.case import Case
    from fsdpcheck.judging.run import Run

    Draw = Callable[[Features, tuple[int, ...]], SearchStrategy[Case]]
    Body = Callable[[Case, Run], None]


class Collected(Protocol):
    """What ``@law`` returns: a function pytest collects, with its law attached."""

    law: Law

    def __call__(self, run: Run) -> None: ...


LAWS: dict[str, Law] = {}
_LAWS_OF_A_USER = references.Kind("laws")


def law(
    name: str,
    *,
    promise: Promise,
    draw: Draw,
    observe: Iterable[Observable] = ("params",),
    needs_traits: Iterable[Trait] = (),
    ranks: int = 1,
    own_models: bool = True,
    needs_promises: Iterable[Promise] = (),
    known_layers: bool = False,
    any_numbers: bool = False,
    takes: int = 1,
    must_occur: Iterable[str] = (),
    vacuous_without: Iterable[str] = (),
) -> Callable[[Body], Collected]:
    """Register the decorated ``body(case, run)`` as the law ``name`` ("chapter.law").

    The result takes only ``run``; pytest collects it, and the plugin runs it with the profile of the session. Called
    by hand it checks the quick profile and raises what it finds. Raises UsageError when the name is taken.
    """

    def decorate(body: Body) -> Collected:
        found = Law(
            name=name,
            promise=promise,
            observe=frozenset(observe),
            draw=draw,
            needs_traits=frozenset(needs_traits),
            body=body,
            statement=inspect.getdoc(body) or "",
            where=_place(body),
            ranks=ranks,
            own_models=own_models,
            needs_promises=frozenset(needs_promises),
            known_layers=known_layers,
            any_numbers=any_numbers,
            takes=takes,
            must_occur=tuple(must_occur),
            vacuous_without=tuple(vacuous_without),
        )
        _register(found)
        return _test(found)

    return decorate


def chapters(more: Iterable[str] = ()) -> dict[str, Law]:
    """All laws by name, after importing every chapter of fsdpcheck.properties. Sorted by chapter, as written.

    ``more``: files or modules with laws of a user's own. Raises UsageError for one that cannot be imported.
    """
    properties = importlib.import_module("fsdpcheck.properties")
    for module in pkgutil.iter_modules(properties.__path__):
        if module.name.startswith("test_"):
            importlib.import_module(f"{properties.__name__}.{module.name}")
    for name in more:
        references.module(name, _LAWS_OF_A_USER)
    return LAWS


def require_known(ref: str, laws: Iterable[str]) -> None:
    """Raise UsageError for laws that the import of an adapter registered in its own process, and nobody has here."""
    if missing := [name for name in laws if name not in LAWS]:
        raise UsageError(
            f"adapter {ref!r} stands in one file with laws, or imports some\n"
            f"  got     {', '.join(missing)}\n"
            f"  wanted  laws in files of their own: they judge where no adapter was ever imported\n"
            f"  next    move them to a file and name it: --laws FILE.py"
        )


def require_shown(ref: str, features: Features) -> None:
    """Raise AdapterError for a promise no law of which can be judged by what the adapter shows."""
    for promise in sorted(features.promises):
        hidden = [law.observe - features.observables - {"params"} for law in LAWS.values() if law.promise == promise]
        if hidden and all(hidden):
            fewest = min(hidden, key=len)
            what = f"adapter {ref!r} promises {promise!r} and does not show what its laws judge by"
            got, wanted = f"observables {sorted(features.observables)}", f"{', '.join(sorted(fewest))} as well"
            then = "add the method of fsdpcheck.adapter.Observed and list it in Features.observables"
            raise AdapterError(explain(what, got=got, wanted=wanted, then=f"{then}, or take the promise away"))


def _register(found: Law) -> None:
    for unknown in sorted({found.promise, *found.needs_promises} - set(get_args(Promise))):
        raise UsageError(f"law {found.name!r}: no promise is called {unknown!r}; known: {', '.join(get_args(Promise))}")
    for label in sorted({*found.must_occur, *found.vacuous_without} - coverage.LABELS.keys()):
        raise UsageError(f"law {found.name!r}: no label is called {label!r}; known: {', '.join(coverage.LABELS)}")
    if found.name in LAWS:
        raise UsageError(f"two laws are called {found.name!r}: {LAWS[found.name].where} and {found.where}")
    if not found.statement:
        raise UsageError(f"law {found.name!r} at {found.where} has no docstring: say what it guarantees")
    LAWS[found.name] = found
    if found.file:
        registered.laws.append(found.name)


def _place(body: Body) -> str:
    code = inspect.unwrap(body).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _test(found: Law) -> Collected:
    def check(run: Run) -> None:
        from fsdpcheck.judging.check import check_law

        check_law(found, run).raise_if_broken()

    test: Collected = check  # type: ignore[assignment]
    test.law = found
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(check, attribute, getattr(found.body, attribute))
    run_parameter = inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    setattr(check, "__wrapped__", found.body)  # noqa: B010 - pytest shows the law's own file and line
    setattr(check, "__signature__", inspect.Signature([run_parameter]))  # noqa: B010
    return test
