"""Registry: ``@law`` makes a law of a function, a pytest test and an entry that the command line reads."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, get_args

from fsdpcheck.adapters.contract import Features, Observable, Promise, Trait
from fsdpcheck.errors import AdapterError, UsageError, explain
from fsdpcheck.judging import coverage
from fsdpcheck.judging.law import Law
from fsdpcheck.loading import law_registry, references
from fsdpcheck.strategies.space import Space

if TYPE_CHECKING:
    from fsdpcheck.judging.law import Body
    from fsdpcheck.judging.run import Run


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
    space: Space | None = None,
    observe: Iterable[Observable] = ("params",),
    needs_traits: Iterable[Trait] = (),
    needs_promises: Iterable[Promise] = (),
    any_numbers: bool = False,
    takes: int = 1,
    climbs: bool = False,
    on_real_ranks: bool = False,
    **moved: object,
) -> Callable[[Body], Collected]:
    """Register the decorated ``body(case, run)`` as the law ``name`` ("chapter.law").

    The result takes only ``run``; pytest collects it, and the plugin runs it with the profile of the session. Called
    by hand it checks the quick profile and raises what it finds. What every case of ``space`` demands need not be
    among ``needs_traits``. Raises UsageError when the name is taken, without a space, and for an option that a space
    says now (``moved``).
    """
    if space is None or moved:
        raise _no_space(name, moved)

    def decorate(body: Body) -> Collected:
        found = Law(
            name=name,
            promise=promise,
            observe=frozenset(observe),
            space=space,
            needs_traits=frozenset(needs_traits) | space.demands,
            body=body,
            statement=inspect.getdoc(body) or "",
            where=_place(body),
            needs_promises=frozenset(needs_promises),
            any_numbers=any_numbers,
            takes=takes,
            climbs=climbs,
            on_real_ranks=on_real_ranks,
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
    for label in sorted({*found.space.must_occur, *found.space.vacuous_without} - coverage.LABELS.keys()):
        raise UsageError(f"law {found.name!r}: no label is called {label!r}; known: {', '.join(coverage.LABELS)}")
    if found.name in LAWS:
        raise UsageError(f"two laws are called {found.name!r}: {LAWS[found.name].where} and {found.where}")
    if not found.statement:
        stripped = sys.flags.optimize > 1
        then = (
            "run Python without -OO or PYTHONOPTIMIZE=2, which strip docstrings"
            if stripped
            else "say what it guarantees"
        )
        raise UsageError(explain(f"law {found.name!r} has no docstring", where=found.where, then=then))
    LAWS[found.name] = found
    if found.file:
        law_registry.laws.append(found.name)


_INSTEAD = {
    "draw": "space=PLAIN, or another of fsdpcheck.laws; space=BuiltSpace(build=...) for a function of one's own",
    "ranks": "space=PLAIN.but(ranks=2)",
    "own_models": 'space=PLAIN.but(user_models="never")',
    "known_layers": 'space=PLAIN.but(user_models="known layers")',
    "must_occur": 'space=PLAIN.but(must_occur=("several ranks",))',
    "vacuous_without": 'space=PLAIN.but(vacuous_without=("several ranks",))',
}
"""Options that ``@law`` had -> what to write in their place."""


def _no_space(name: str, options: Iterable[str]) -> UsageError:
    """The error for a law that says no space, or says with options what its space has to say."""
    got = ", ".join(f"{option}=" for option in options) or "no space="
    then = "; ".join(_INSTEAD.get(option, f"leave {option}= out") for option in options or ("draw",))
    wanted = "space=, which says the cases that the law is about and what must occur among them"
    return UsageError(
        f"law {name!r} does not say its cases by a space\n  got     {got}\n  wanted  {wanted}\n  next    write {then}"
    )


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
