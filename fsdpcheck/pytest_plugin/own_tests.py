"""Laws in a user's own tests: ``check(adapter)``, and ``@parametrize_with_laws(adapter)``, which makes a test of each.

A test file may have imported what it tests, so nothing is judged in its process: laws run in a process of their own,
which imports no implementation, as in ``fsdpcheck run``. This module imports neither torch nor hypothesis.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, Unpack

from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.errors import UsageError, explain, spelling
from fsdpcheck.errors.excerpt import visible
from fsdpcheck.session.plan import Plan, parse_globs, parse_traits, parse_world_sizes

if TYPE_CHECKING:
    from fsdpcheck.findings.verdict import Verdict
    from fsdpcheck.session.judge import Judge
    from fsdpcheck.session.ledger import Ledger

    Function = TypeVar("Function", bound=Callable[..., Any])

ATTRIBUTE: Final = "fsdpcheck_laws"
"""What a decorated function has: the Asked."""
_TEXTS: Final = ("engine", "model", "batch", "loss", "optimizer")


class Options(TypedDict, total=False):
    """What both functions may be told, by the names of ``fsdpcheck run``; what is not said is as pytest's options say.

    ``laws``: globs over names of laws. ``world_sizes``: "1-5", a number, or several. ``avoid``: traits that no case may
    demand. ``require``: globs; each law that matches has to be promised. ``laws_from``: files with laws of your own.
    """

    laws: str | Sequence[str]
    world_sizes: str | int | Sequence[int]
    profile: str
    avoid: str | Sequence[str]
    seed: int
    budget: float | None
    confirm: bool
    engine: str
    model: str
    batch: str
    loss: str
    optimizer: str
    units: Sequence[str] | None
    real: bool
    laws_from: str | Sequence[str]
    roots: int
    require: str | Sequence[str]


class LawsBroken(AssertionError):
    """Not every promised law holds; the text is the report of ``fsdpcheck run``, ``ledger`` has it as data."""

    def __init__(self, text: str, ledger: Ledger) -> None:
        super().__init__(text)
        self.ledger = ledger


@dataclass(frozen=True)
class Told:
    """A verdict, what it was judged by, and the traits that the adapter does not accept."""

    verdict: Verdict
    plan: Plan
    unaccepted: Sequence[str] = ()
    versions: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Asked:
    """What a decorated test asks for: adapters as references, fields of a Plan, globs of laws that are required."""

    adapters: tuple[str, ...]
    said: Mapping[str, Any]
    require: tuple[str, ...]

    def plan(self, defaults: Plan) -> Plan:
        """The plan of it, where what is not said is as in ``defaults``."""
        return replace(defaults, adapters=self.adapters, **self.said)


@dataclass(frozen=True)
class BoundLaw:
    """A law on an adapter, as a test is given it. ``reason``: why it is not promised, "" where it is."""

    law: str
    adapter: str
    reason: str
    space: str
    required: bool
    plan: Plan
    judge: Callable[[Plan], Judge]

    def check(self) -> Verdict:
        """Judge it: the test fails with what breaks it, and is skipped where the law is not promised."""
        from fsdpcheck.pytest_plugin import outcome

        __tracebackhide__ = True
        judge = self.judge(self.plan)
        verdict = judge.ask(self.law, self.adapter)
        ledger = judge.ledger
        tell(Told(verdict, ledger.plan, ledger.unaccepted.get(self.adapter, ()), ledger.versions))
        outcome.conclude(verdict, self.required)
        return verdict


defaults = Plan(())
"""What is not said: of the running pytest session, if there is one."""
_hearers: list[Callable[[Told], None]] = []


@contextmanager
def heard_by(hearer: Callable[[Told], None]) -> Iterator[None]:
    """What is judged within it is told to ``hearer``."""
    _hearers.append(hearer)
    try:
        yield
    finally:
        _hearers.remove(hearer)


def tell(told: Told) -> None:
    """Tell who listens."""
    for hearer in _hearers:
        hearer(told)


def parametrize_with_laws(
    adapter: object | Sequence[object], **options: Unpack[Options]
) -> Callable[[Function], Function]:
    """Make of the decorated test one test for each law that ``adapter`` promises, with the law's name as its id.

    The test takes ``law`` and has to call ``law.check()``, which fails it with what breaks the law::

        @fsdpcheck.parametrize_with_laws("train.py:MyAdapter")
        def test_laws(law):
            law.check()

    ``adapter``: a reference, or what one names: a class, function or object at the top of an importable file; or a list
    of such. ``options``: see Options. Laws run in a process of their own. Raises UsageError for options and adapters
    that cannot be, here or when tests are collected.
    """
    several = adapter if isinstance(adapter, list | tuple) else [adapter]
    if not several:
        raise UsageError(explain("parametrize_with_laws is given no adapter", got=adapter, wanted="one at least"))
    said, require = _said(options)
    asked = Asked(tuple(dict.fromkeys(map(reference, several))), said, require)

    def decorate(function: Function) -> Function:
        if "law" not in inspect.signature(function).parameters:
            then = "write def test_laws(law): law.check()"
            raise UsageError(explain(f"{function.__name__} does not take the law that it is to check", then=then))
        setattr(function, ATTRIBUTE, asked)
        return function

    return decorate


def check(adapter: object, **options: Unpack[Options]) -> Ledger:
    """Assert that every promised law holds of ``adapter``, as ``fsdpcheck run`` judges them.

    ``adapter`` and ``options`` as in ``parametrize_with_laws``. Returns what was judged, ``verdicts`` among it.
    Guarantee: if it returns, each chosen law that the adapter promises holds, and there is one. Raises LawsBroken, with
    the report, where one does not, and UsageError for what cannot be judged at all. Judging takes place in processes of
    its own.
    """
    from fsdpcheck.errors import HOLDS, USAGE
    from fsdpcheck.report import summary
    from fsdpcheck.session.supervisor import supervise

    __tracebackhide__ = True
    said, require = _said(options)
    ledger = supervise(Asked((reference(adapter),), said, require).plan(defaults), lambda ledger, event: None)
    if ledger.interrupted:
        raise KeyboardInterrupt
    for verdict in ledger.verdicts.values():
        tell(Told(verdict, ledger.plan, ledger.unaccepted.get(verdict.adapter, ()), ledger.versions))
    if not ledger.verdicts and {code for _, code in ledger.errors} == {USAGE}:
        raise UsageError("\n".join(text for text, _ in ledger.errors))
    lacking = _lacking(ledger, require)
    if ledger.exit_code != HOLDS or lacking:
        raise LawsBroken("\n".join([summary.ending(ledger, lambda text, colour: text), *lacking]), ledger)
    return ledger


def _lacking(ledger: Ledger, require: tuple[str, ...]) -> list[str]:
    from fsdpcheck.session.requirements import lacking

    return [visible(sentence) for sentence in lacking(ledger, require, ledger.laws)]


def _said(options: Options) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of a Plan, and globs that are required. Raises TypeError for an unknown one, UsageError."""
    known = Options.__annotations__
    if strange := [name for name in options if name not in known]:
        raise TypeError(
            f"unexpected option {strange[0]!r}.{spelling.hint(strange[0], known)} Known: {', '.join(known)}"
        )
    said: dict[str, Any] = dict(options)
    require = _several(said.pop("require", ()))
    for name in ("laws", "laws_from", "units"):
        if said.get(name) is not None:
            said[name] = _several(said[name])
    if "world_sizes" in said:
        sizes = said["world_sizes"]
        said["world_sizes"] = parse_world_sizes(sizes if isinstance(sizes, str) else ",".join(map(str, _listed(sizes))))
    if "avoid" in said:
        said["avoid"] = parse_traits(",".join(_several(said["avoid"]))) if said["avoid"] else ()
    if said.get("profile", "quick") not in PROFILES:
        hint = spelling.hint(said["profile"], PROFILES)
        raise UsageError(f"there is no profile {said['profile']!r};{hint} known: {', '.join(PROFILES)}")
    return said, require


def _several(given: str | Sequence[str]) -> tuple[str, ...]:
    return parse_globs(given) if isinstance(given, str) else tuple(part for one in given for part in parse_globs(one))


def _listed(given: int | Sequence[int]) -> Sequence[int]:
    return [given] if isinstance(given, int) else given


def reference(adapter: object) -> str:
    """What names ``adapter`` in any process: a string as it is, else the place of a class, function or object.

    Raises UsageError for one that has no name at the top of a file.
    """
    if isinstance(adapter, str):
        return adapter
    is_named = inspect.isclass(adapter) or inspect.isfunction(adapter)
    home = sys.modules.get(str(getattr(adapter if is_named else type(adapter), "__module__", "")))
    names = [name for name, value in vars(home).items() if value is adapter] if home is not None else []
    file = getattr(home, "__file__", None)
    if home is None or not names or file is None:
        got = (
            f"{getattr(adapter, '__qualname__', type(adapter).__qualname__)}, which has no name at the top of its file"
        )
        then = "put it there, or name it: 'file.py:attr', 'pkg.mod:attr'"
        what = "laws are judged in a process of its own, which has to find the adapter"
        raise UsageError(explain(what, got=got, wanted="a reference, or a global of an importable file", then=then))
    name = (
        names[0] if not is_named else next((one for one in names if one == getattr(adapter, "__name__", "")), names[0])
    )
    return f"{home.__name__ if _importable(home.__name__) else Path(file).resolve()}:{name}"


def _importable(module: str) -> bool:
    """Whether another process finds ``module`` by its name: a part of a package that lies on the import path."""
    package = sys.modules.get(module.partition(".")[0])
    file = getattr(package, "__file__", None)
    if "." not in module or file is None:
        return False
    return str(Path(file).parent.parent) in sys.path
