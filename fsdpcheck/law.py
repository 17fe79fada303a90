"""Law: a sentence that must hold of every implementation that promises it, and how to draw cases for it.

A law is written once, as a function of (case, run); ``@law`` makes it a pytest test and an entry of the registry that
the command line reads.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, get_args

from fsdpcheck import coverage
from fsdpcheck.adapters._base import Features, Promise, Trait
from fsdpcheck.errors import AdapterError, UsageError
from fsdpcheck.execution import Observable

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from fsdpcheck.case import Case
    from fsdpcheck.runner import Run

    Draw = Callable[[Features, tuple[int, ...]], SearchStrategy[Case]]
    Body = Callable[[Case, Run], None]


@dataclass(frozen=True)
class Law:
    """One law.

    ``body(case, run)`` returns or raises Violation. ``draw(features, world_sizes)`` gives a strategy of cases that an
    implementation with these features accepts, on one of these numbers of ranks. ``needs_traits``: what every case of
    this law demands. ``needs_promises``: what must be promised beside ``promise``. ``statement``: the law in words (the
    docstring): a guarantee in one line, then, of a law of this project, lines "Not seen: ..." and "Source: ...".
    ``where``: file:line of the body. ``ranks``: the fewest on which the law says anything; smaller worlds
    are not drawn. ``own_models``: whether it can be asked of a user's own model, whatever that is made of and however
    small; ``known_layers``: only of one whose parameters are in layers of torch that have a word among the traits.
    ``any_numbers``: whether its cases have real numbers where they are accepted, without asking for them.
    ``takes``: the fewest ranks that an implementation has to take, whatever numbers are asked for.

    ``must_occur``: labels (coverage.LABELS) that its judged cases must have where they can; ``vacuous_without``: ones
    without which its "holds" would say nothing, so that there is none without them, whatever kept them out.
    """

    name: str
    promise: Promise
    observe: frozenset[Observable]
    draw: Draw
    needs_traits: frozenset[Trait]
    body: Body
    statement: str
    where: str
    ranks: int = 1
    own_models: bool = True
    needs_promises: frozenset[Promise] = frozenset()
    known_layers: bool = False
    any_numbers: bool = False
    takes: int = 1
    must_occur: tuple[str, ...] = ()
    vacuous_without: tuple[str, ...] = ()

    @property
    def guarantee(self) -> str:
        """The first paragraph of the statement, on one line."""
        return " ".join(self.statement.split("\n\n")[0].split())

    def not_promised(self, features: Features) -> str:
        """Why an implementation with these features does not answer for this law; "" when it does."""
        for promise in (self.promise, *sorted(self.needs_promises)):
            if promise not in features.promises:
                return f"no promise {promise!r}: {features.reason(promise) or 'the adapter gives no reason'}"
        if hidden := self.observe - features.observables - {"params"}:
            return f"the adapter does not show {', '.join(sorted(hidden))}"
        if unmet := self.needs_traits - features.accepts:
            return f"the adapter does not accept {', '.join(sorted(unmet))}"
        taken = features.max_world_size
        if taken is not None and taken < self.fewest:
            return f"the law says nothing on fewer than {self.fewest} ranks, the adapter takes {taken}"
        return ""

    @property
    def fewest(self) -> int:
        """The fewest ranks of an implementation of which the law says anything."""
        return max(self.says_on, self.takes)

    @property
    def says_on(self) -> int:
        """The fewest ranks that have to be asked for if the law is to say anything."""
        return max(self.ranks, *(coverage.LABELS[label].ranks for label in self.vacuous_without), 1)

    def vain_on(self, world_sizes: Iterable[int]) -> str:
        """Why the law says nothing on any of these numbers of ranks; "" where it does on one."""
        sizes, why = tuple(dict.fromkeys(world_sizes)), ""
        if max(sizes) < self.says_on:
            why = f"fewer than {self.says_on}"
        elif not all(any(map(coverage.LABELS[label].can_be_on, sizes)) for label in self.vacuous_without):
            why = "a prime number of"
        return f"the law says nothing on {why} ranks, asked were {', '.join(map(str, sizes))}" if why else ""


class Collected(Protocol):
    """What ``@law`` returns: a function pytest collects, with its law attached."""

    law: Law

    def __call__(self, run: Run) -> None: ...


LAWS: dict[str, Law] = {}


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


def chapters() -> dict[str, Law]:
    """All laws by name, after importing every chapter of fsdpcheck.properties. Sorted by chapter, as written."""
    properties = importlib.import_module("fsdpcheck.properties")
    for module in pkgutil.iter_modules(properties.__path__):
        if module.name.startswith("test_"):
            importlib.import_module(f"{properties.__name__}.{module.name}")
    return LAWS


def require_shown(ref: str, features: Features) -> None:
    """Raise AdapterError for a promise no law of which can be judged by what the adapter shows."""
    for promise in sorted(features.promises):
        hidden = [law.observe - features.observables - {"params"} for law in LAWS.values() if law.promise == promise]
        if hidden and all(hidden):
            fewest = min(hidden, key=len)
            raise AdapterError(
                f"adapter {ref!r} promises {promise!r} and does not show what its laws judge by\n"
                f"  got     observables {sorted(features.observables)}\n"
                f"  wanted  {', '.join(sorted(fewest))} as well\n"
                f"  next    add the method of fsdpcheck.adapter.Observed and list it in Features.observables,"
                " or take the promise away"
            )


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


def _place(body: Body) -> str:
    code = inspect.unwrap(body).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _test(found: Law) -> Collected:
    def check(run: Run) -> None:
        from fsdpcheck.check import check_law

        check_law(found, run).raise_if_broken()

    test: Collected = check  # type: ignore[assignment]
    test.law = found
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(check, attribute, getattr(found.body, attribute))
    run_parameter = inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    setattr(check, "__wrapped__", found.body)  # noqa: B010 - pytest shows the law's own file and line
    setattr(check, "__signature__", inspect.Signature([run_parameter]))  # noqa: B010
    return test
