"""The pytest plugin: laws as tests, one for each adapter, and an account of what was promised and what was checked.

And ``world``, for a user's own tests of distributed code (world.py). It loads in every pytest run on the machine, so it
imports neither torch nor hypothesis and does nothing where no law is collected.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdpcheck import adapters, engines
from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.errors import FsdpcheckError, excerpt
from fsdpcheck.pytest_plugin import world as _world
from fsdpcheck.report import colour, conditions, finding, unjudged_cases
from fsdpcheck.session.plan import Plan, parse_traits, parse_world_sizes

if TYPE_CHECKING:
    from fsdpcheck.adapters.contract import Features
    from fsdpcheck.findings.verdict import Verdict
    from fsdpcheck.judging.law import Law
    from fsdpcheck.judging.run import Run

_PLAN = pytest.StashKey[Plan]()
_WORLD = pytest.StashKey[_world.World]()
_ACCOUNT = pytest.StashKey["_Account"]()
_PROPERTY = "fsdpcheck"
_SHARED = "simulated ranks share {}, and write to it; `fsdpcheck run` tries what holds on real ranks"
_NOT_RUN = ("not promised", "not asked", "no case", "too few cases", "not supported")
_PROMISED = "fsdpcheck_promised"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fsdpcheck", "fsdpcheck: laws of sharded training")
    group.addoption(
        "--fsdpcheck-adapter",
        action="append",
        default=[],
        metavar="NAME",
        help="check this implementation: a built-in name, pkg.mod:attr or file.py:attr (repeatable)",
    )
    group.addoption(
        "--fsdpcheck-avoid", default="", metavar="TRAITS", help="draw no such case: tied,frozen (default: none)"
    )
    engine, profile = "how ranks are had (default: simulated)", "cases a law: quick, ci, nightly (default: quick)"
    group.addoption("--fsdpcheck-engine", choices=("simulated", "processes"), default="simulated", help=engine)
    group.addoption("--fsdpcheck-profile", choices=tuple(PROFILES), default="quick", help=profile)
    group.addoption("--fsdpcheck-world-size", default="", metavar="1-5", help="3, 1-5 or 2,13 (default: 1-5 in quick)")
    ranks = f"ranks of the fixture world: {' or '.join(_world.KINDS)} (default: simulated, or what ini says)"
    group.addoption(_world.OPTION, choices=_world.KINDS, default=None, help=ranks)
    parser.addini(_world.INI, f"{ranks}; {_world.OPTION} comes first", default=_world.KINDS[0])
    waits = "seconds after which gloo gives up on real ranks of the fixture world (default: 60)"
    parser.addini(_world.TIMEOUT, waits, default="60")


def pytest_configure(config: pytest.Config) -> None:
    asked = tuple(dict.fromkeys(config.getoption("--fsdpcheck-adapter")))
    try:
        sizes_named = config.getoption("--fsdpcheck-world-size")
        sizes = parse_world_sizes(sizes_named) if sizes_named else ()
        named = config.getoption("--fsdpcheck-avoid")
        avoid = parse_traits(named) if named else ()
        config.stash[_WORLD] = _world.of_session(config)
        _require_checkable(asked)
    except FsdpcheckError as error:
        raise pytest.UsageError(excerpt.visible(str(error))) from error
    config.stash[_PLAN] = Plan(
        adapters=asked or adapters.default_names(),
        engine=config.getoption("--fsdpcheck-engine"),
        world_sizes=sizes,
        profile=config.getoption("--fsdpcheck-profile"),
        avoid=avoid,
    )
    config.stash[_ACCOUNT] = _Account()
    config.pluginmanager.register(_Accountant(config.stash[_ACCOUNT]))


def _require_checkable(asked: tuple[str, ...]) -> None:
    """As ``fsdpcheck run`` does first. Imports torch, which is right where somebody names an adapter."""
    if asked:
        from fsdpcheck.judging import registry

        registry.chapters()
        for ref in asked:
            registry.require_shown(ref, _declared(ref))


def _declared(ref: str) -> Features:
    """What an adapter declares; its code is imported in a process of its own."""
    from fsdpcheck.engines._common import hosts

    return hosts.declared(ref).features


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _law_of(metafunc.function) is not None:
        metafunc.parametrize("run", metafunc.config.stash[_PLAN].adapters, indirect=True, scope="session")


@pytest.fixture(scope="session")
def _fsdpcheck_engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    import torch

    torch.set_num_threads(1)
    engine = engines.open_engine(request.config.stash[_PLAN].engine)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest, _fsdpcheck_engine: Any) -> Run:
    """One implementation under test on the session's engine; a law runs once for each --fsdpcheck-adapter."""
    from fsdpcheck.judging.run import Run

    plan = request.config.stash[_PLAN]
    return Run(_fsdpcheck_engine, getattr(request, "param", plan.adapters[0]), avoid=frozenset(plan.avoid))


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> _world.World:
    """Ranks for a test of your own: world.run(step, 4, ...) is what each of 4 ranks returns; a hang fails the test."""
    return request.config.stash[_WORLD]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    law = _law_of(pyfuncitem.obj)
    if law is None:
        return None
    from fsdpcheck.judging.check import check_law

    plan = pyfuncitem.config.stash[_PLAN]
    bound: Any = pyfuncitem.funcargs["run"]
    verdict = check_law(law, bound, plan.profile, plan.world_sizes, roots=plan.roots)
    told = {name: getattr(verdict, name) for name in ("law", "status", "cases", "rejected", "adapter", "never", "left")}
    pyfuncitem.user_properties.append((_PROPERTY, {**told, "shared": list(bound.ran.shared)}))
    _conclude(verdict)
    return True


def _conclude(verdict: Verdict) -> None:
    verdict = excerpt.shown(verdict)
    if verdict.status in ("not promised", "not asked"):
        pytest.skip(f"{verdict.status}: {verdict.reason}")
    if verdict.finding is not None:
        paint = colour.painter(sys.stdout)
        told = [finding.render([one], number, paint) for number, one in enumerate(verdict.findings, 1)]
        pytest.fail("\n\n".join(told), pytrace=False)
    if verdict.status != "holds":
        pytest.fail(finding.trouble(verdict), pytrace=False)


class _Account:
    """How many checks were promised, and how many ran; a check is a law on an adapter that promises it.

    A skip that silently turned 47 checks into 1 and stayed green is the trap (scikit-learn #33003).
    """

    def __init__(self) -> None:
        self.promised = 0
        self.verdicts: Counter[str] = Counter()
        self.cases = 0
        self.judged: set[str] = set()
        """Laws of which cases were judged."""
        self.never: list[tuple[str, str, list[str]]] = []
        """(adapter, law, kinds of cases of which it judged none), of those that hold."""
        self.left: dict[str, None] = {}
        """What adapters left changed of their processes, and what simulated ranks shared of theirs."""

    @property
    def ran(self) -> int:
        return self.verdicts.total() - sum(self.verdicts[status] for status in _NOT_RUN)

    def add(self, told: dict[str, Any]) -> None:
        self.verdicts[told["status"]] += 1
        self.cases += told["cases"]
        self.left.update(dict.fromkeys(f"{told['adapter']}: {what}; it was put back" for what in told.get("left", ())))
        self.left.update(dict.fromkeys(f"{told['adapter']}: {_SHARED.format(one)}" for one in told.get("shared", ())))
        self.judged |= {told["law"]} if told["cases"] else set()
        if told["status"] == "holds":
            self.never.append((told["adapter"], told["law"], told["never"]))

    def __str__(self) -> str:
        statuses = ", ".join(f"{count} {status}" for status, count in sorted(self.verdicts.items()))
        return f"{self.promised} checks promised, {self.ran} ran, {self.cases} distinct cases ({statuses or 'none'})"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Laws of one space stand one after the other, for they share cases and executions; all else stays where it is."""
    places = [number for number, item in enumerate(items) if _law_of(getattr(item, "obj", None)) is not None]
    first: dict[object, int] = {}
    laws = [(first.setdefault(_shared_by(items[place]), place), place, items[place]) for place in places]
    for place, (_, _, item) in zip(places, sorted(laws, key=lambda law: law[:2]), strict=True):
        items[place] = item


def _shared_by(item: pytest.Item) -> object:
    """The adapter and the space of a law."""
    callspec = getattr(item, "callspec", None)
    law: Law = getattr(item, "obj").law  # noqa: B009
    return callspec and callspec.params["run"], law.space.drawn.key


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        law = _law_of(getattr(item, "obj", None))
        callspec = getattr(item, "callspec", None)
        if law is not None and callspec is not None:
            promised = not law.not_promised(_declared(callspec.params["run"]))
            session.config.stash[_ACCOUNT].promised += promised


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    account = session.config.stash[_ACCOUNT]
    workeroutput = getattr(session.config, "workeroutput", None)
    if workeroutput is not None:
        workeroutput[_PROMISED] = account.promised
    elif session.exitstatus == 0 and not session.config.option.collectonly:
        if account.ran < account.promised:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif _in_vain(session.config):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR


def _in_vain(config: pytest.Config) -> bool:
    """Was an adapter named, and none of the laws that were asked of it promised?"""
    account = config.stash[_ACCOUNT]
    return bool(config.getoption("--fsdpcheck-adapter") and account.verdicts and not account.promised)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    account = config.stash[_ACCOUNT]
    if not account.promised and not account.verdicts:
        return
    if config.option.collectonly:
        terminalreporter.section("fsdpcheck")
        terminalreporter.line(f"{account.promised} checks promised; none is run to collect them")
        return
    terminalreporter.section("fsdpcheck")
    terminalreporter.line(str(account))
    avoided = unjudged_cases.avoided(config.stash[_PLAN].avoid, "--fsdpcheck-avoid")
    for sentence in (
        *conditions.sentences(account.judged),
        *avoided,
        *unjudged_cases.never(account.never),
        *account.left,
    ):
        terminalreporter.line(sentence)
    if account.ran < account.promised:
        terminalreporter.line(
            f"only {account.ran} of {account.promised} promised checks ran: this is a failure", red=True
        )
    elif _in_vain(config):
        terminalreporter.line(
            "nothing was checked: none of these laws is promised by an adapter that was named; next: choose other laws,"
            " or add the promise to the adapter's Features",
            red=True,
        )


class _Accountant:
    """Fills in the account from the reports of this session, which under pytest-xdist come from all its workers."""

    def __init__(self, account: _Account) -> None:
        self._account = account

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, told in report.user_properties:
                if name == _PROPERTY and isinstance(told, dict):
                    self._account.add(told)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker of pytest-xdist ended; each collects everything, so the largest number of promises counts."""
        promised = getattr(node, "workeroutput", {}).get(_PROMISED, 0)
        self._account.promised = max(self._account.promised, promised)


def _law_of(function: object) -> Law | None:
    module = sys.modules.get("fsdpcheck.judging.law")  # where it was never imported no law can be
    law = getattr(function, "law", None)
    return law if module is not None and isinstance(law, module.Law) else None


def _properties() -> Path | None:
    spec = importlib.util.find_spec("fsdpcheck.properties")
    return Path(spec.submodule_search_locations[0]).resolve() if spec and spec.submodule_search_locations else None


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    # A plain folder, not a Package: pytest would import its __init__.py by the name it guesses from the path, and in a
    # checkout that is the second copy ``properties``.
    return pytest.Dir.from_parent(parent, path=path) if path.resolve() == _properties() else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _Chapter.from_parent(parent, path=module_path) if module_path.resolve().parent == _properties() else None


class _Chapter(pytest.Module):
    """A chapter of laws, imported by its canonical name wherever its file lies."""

    def _getobj(self) -> Any:
        return importlib.import_module(f"fsdpcheck.properties.{self.path.stem}")
