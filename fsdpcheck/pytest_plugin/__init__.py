"""The pytest plugin: laws as tests, one for each adapter, and an account of what was promised and what was checked.

And ``world``, for a user's own tests of distributed code (world.py), and laws in a user's own tests (own_tests.py). It
loads in every pytest run on the machine, so it imports neither torch nor hypothesis and does nothing where no law is.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from fsdpcheck import engines
from fsdpcheck.engines._common import metal
from fsdpcheck.errors import FsdpcheckError, spelling
from fsdpcheck.errors.excerpt import visible
from fsdpcheck.pytest_plugin import options, outcome, own_tests
from fsdpcheck.pytest_plugin import world as _world
from fsdpcheck.pytest_plugin.account import PROMISED, RANKS, TOLD, VANISHED, Account, Accountant, Collected
from fsdpcheck.session.plan import Plan

if TYPE_CHECKING:
    from fsdpcheck.adapters.contract import Features
    from fsdpcheck.judging.law import Law
    from fsdpcheck.judging.run import Run
    from fsdpcheck.pytest_plugin.judges import Judges

_PLAN = pytest.StashKey[Plan]()
_ASKED = pytest.StashKey[tuple[str, ...]]()
"""Adapters that were named by an option."""
_WORLD = pytest.StashKey[_world.World]()
_ACCOUNT = pytest.StashKey[Account]()
_LACKS = pytest.StashKey[list[str]]()
_JUDGES: pytest.StashKey[Judges] = pytest.StashKey()
_COLLECTED = pytest.StashKey[Any]()
"""The judge of this process, collected.Collected."""
_HEARD = pytest.StashKey[list[own_tests.Told]]()
_ON_REAL_RANKS: Final = "asked on real ranks alone: --fsdpcheck-engine processes"
_LAWS: Final = "fsdpcheck.properties"
"""Where an argument names them, the processes that they need are prepared while the tests are collected."""
_VAIN: Final = (
    "nothing was checked: none of these laws is promised by an adapter that was named; next: choose other laws,"
    " or add the promise to the adapter's Features"
)

pytest_addoption = options.add


def pytest_configure(config: pytest.Config) -> None:
    asked = tuple(dict.fromkeys(config.getoption("--fsdpcheck-adapter")))
    try:
        config.stash[_PLAN] = plan = options.plan(config)
        config.stash[_ACCOUNT] = account = Account(plan)
        config.stash[_WORLD] = _world.of_session(config, account.ranks)
        _require_checkable(config, asked)
    except FsdpcheckError as error:
        raise pytest.UsageError(visible(str(error))) from error
    config.stash[_ASKED], config.stash[_LACKS] = asked, []
    before, own_tests.defaults = own_tests.defaults, plan
    config.add_cleanup(lambda: setattr(own_tests, "defaults", before))
    config.pluginmanager.register(Accountant(config.stash[_ACCOUNT]))
    config.pluginmanager.register(Collected(config.stash[_ACCOUNT], lambda item: bool(_name(item))))


def _require_checkable(config: pytest.Config, asked: tuple[str, ...]) -> None:
    """As ``fsdpcheck run`` does first. Imports torch, which is right where somebody names an adapter or a law."""
    if asked:
        from fsdpcheck.judging import registry

        registry.chapters()
        for ref in asked:
            registry.require_shown(ref, _declared(ref))
    plan = config.stash[_PLAN]
    if plan.model:
        from fsdpcheck.judging import model_process

        model_process.inspected(*plan.own[:3], plan.units, plan.optimizer)
    if base := config.getoption("--fsdpcheck-baseline"):
        from fsdpcheck.session import baseline

        baseline.read(Path(base))


def _declared(ref: str) -> Features:
    """What an adapter declares; its code is imported in a process of its own."""
    from fsdpcheck.engines._common import hosts

    return hosts.declared(ref).features


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    collects = not session.config.pluginmanager.has_plugin("dsession")  # xdist has its workers collect
    if collects and any(_LAWS in argument for argument in session.config.args):
        from fsdpcheck.engines._common import hosts

        hosts.prepare(session.config.stash[_PLAN].adapters[0])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    law, asked = _law_of(metafunc.function), getattr(metafunc.function, own_tests.ATTRIBUTE, None)
    if law is not None:
        refs = metafunc.config.stash[_PLAN].adapters
        ids = [f"{law.name}-{ref}" for ref in refs]
        marks = [pytest.mark.skip(_ON_REAL_RANKS)] * _is_unasked(law, metafunc.config)
        rows = [pytest.param(ref, marks=marks) for ref in refs]
        metafunc.parametrize("run", rows, indirect=True, scope="session", ids=ids)
    elif isinstance(asked, own_tests.Asked):
        try:
            bound = _judges(metafunc.config).laws(asked, metafunc.config.stash[_PLAN])
        except FsdpcheckError as error:
            raise pytest.Collector.CollectError(visible(str(error))) from error
        several = len(asked.adapters) > 1
        ids = [f"{one.law}-{one.adapter}" if several else one.law for one in bound]
        metafunc.parametrize("law", bound, ids=ids)


def _is_unasked(law: Law, config: pytest.Config) -> bool:
    """Whether a law is asked on real ranks alone, and these are simulated."""
    return law.on_real_ranks and metal.is_simulated(config.stash[_PLAN].engine)


def _judges(config: pytest.Config) -> Judges:
    if _JUDGES not in config.stash:
        from fsdpcheck.pytest_plugin.judges import Judges

        config.stash[_JUDGES] = Judges()
        config.add_cleanup(config.stash[_JUDGES].close)
    return config.stash[_JUDGES]


@pytest.fixture(scope="session")
def _fsdpcheck_engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    import torch

    from fsdpcheck.pytest_plugin.collection import Collected

    torch.set_num_threads(1)
    plan = request.config.stash[_PLAN]
    engine = engines.open_engine(plan.engine, plan.budget)
    with ExitStack() as stack:
        request.config.stash[_COLLECTED] = Collected(plan, engine, stack)
        yield engine
    engine.close()


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest, _fsdpcheck_engine: Any) -> Run:
    """One implementation under test on the session's engine; a law runs once for each --fsdpcheck-adapter."""
    plan = request.config.stash[_PLAN]
    bound: Run = request.config.stash[_COLLECTED].run(getattr(request, "param", plan.adapters[0]))
    return bound


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> _world.World:
    """Ranks for a test of your own: world.run(step, 4, ...) is what each of 4 ranks returns; a hang fails the test."""
    return request.config.stash[_WORLD]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    law = _law_of(pyfuncitem.obj)
    if law is None:
        return None
    bound: Any = pyfuncitem.funcargs["run"]
    told = pyfuncitem.config.stash[_COLLECTED].judge(law, bound.adapter_ref)
    own_tests.tell(told)
    outcome.conclude(told.verdict)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Hear what the test judges. One that was given a law and did not check it fails: it would be green for nothing."""
    heard = item.stash[_HEARD] = []
    try:
        with own_tests.heard_by(heard.append):
            yield
    finally:
        item.user_properties += [pair for told in heard for pair in _properties_of(told)]
    if (bound := _bound(item)) is not None and not heard:
        pytest.fail(f"{bound.law} was not checked; next: call law.check() in the test", pytrace=False)


def _properties_of(told: own_tests.Told) -> list[tuple[str, object]]:
    """What JUnit's file has of a verdict, a property each."""
    verdict, tokens = told.verdict, " ".join(one.token for one in told.verdict.findings)
    said = {"law": verdict.law, "adapter": verdict.adapter, "status": verdict.status, "cases": verdict.cases}
    said |= {"rejected": verdict.rejected} | ({"tokens": tokens} if tokens else {})
    return [(f"fsdpcheck_{name}", value) for name, value in said.items()]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "call":
        setattr(report, TOLD, [_data(told) for told in item.stash.get(_HEARD, [])])
    return report


def _data(told: own_tests.Told) -> dict[str, Any]:
    """Plain data, which pytest-xdist sends on."""
    shared = {"profile": told.plan.profile, "avoid": list(told.plan.avoid), "unaccepted": list(told.unaccepted)}
    return {"verdict": told.verdict.to_data(), **shared, "versions": dict(told.versions or {})}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Laws of one space stand one after the other, for they share cases and executions; all else stays where it is.

    Those that --fsdpcheck-law and the tier leave out are deselected.
    """
    plan = config.stash[_PLAN]
    _require_laws(plan, {name for item in items if (name := _name(item))})
    if out := [item for item in items if (law := _name(item)) and not _is_chosen(law, item, plan)]:
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=out)
    places = [number for number, item in enumerate(items) if _name(item)]
    first: dict[object, int] = {}
    laws = [(first.setdefault(_shared_by(items[place]), place), place, items[place]) for place in places]
    for place, (_, _, item) in zip(places, sorted(laws, key=lambda law: law[:2]), strict=True):
        items[place] = item


def _require_laws(plan: Plan, collected: set[str]) -> None:
    """Raise pytest's UsageError for a glob of --fsdpcheck-law that no collected law matches."""
    for glob in plan.laws if plan.laws != ("*",) else ():
        if not fnmatch.filter(collected, glob):
            hint = spelling.hint_of_glob(glob, collected) if collected else ""
            raise pytest.UsageError(visible(f"--fsdpcheck-law: no law that was collected matches {glob!r}.{hint}"))


def _is_chosen(law: str, item: pytest.Item, plan: Plan) -> bool:
    if not any(fnmatch.fnmatchcase(law, glob) for glob in plan.laws):
        return False
    found = _law_of(getattr(item, "obj", None))
    return found is None or not plan.model or ("real" in found.needs_traits) == plan.real or found.any_numbers


def _shared_by(item: pytest.Item) -> object:
    """The adapter and the space of a law."""
    if (bound := _bound(item)) is not None:
        return bound.plan, bound.adapter, bound.space
    callspec = getattr(item, "callspec", None)
    law: Law = getattr(item, "obj").law  # noqa: B009
    return callspec and callspec.params["run"], law.space.drawn.key


def pytest_collection_finish(session: pytest.Session) -> None:
    promised = session.config.stash[_ACCOUNT].promised
    for item in session.items:
        law, bound, callspec = _law_of(getattr(item, "obj", None)), _bound(item), getattr(item, "callspec", None)
        if bound is not None and (bound.required or not bound.reason):
            promised[item.nodeid] = (bound.law, bound.adapter)
        elif law is None or callspec is None or _is_unasked(law, session.config):
            continue
        elif not law.not_promised(_declared(callspec.params["run"])):
            promised[item.nodeid] = (law.name, callspec.params["run"])


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config, account = session.config, session.config.stash[_ACCOUNT]
    workeroutput = getattr(config, "workeroutput", None)
    if workeroutput is not None:
        workeroutput[PROMISED] = {test: list(pair) for test, pair in account.promised.items()}
        workeroutput[VANISHED] = list(account.vanished)
        workeroutput[RANKS] = dict(account.ranks)
        return
    if config.option.collectonly:
        return
    lacks, asked = config.stash[_LACKS], config.stash[_ASKED]
    try:
        lacks += account.end(*_required(config), config.getoption("--fsdpcheck-baseline"), asked)
        if name := config.getoption("--fsdpcheck-json"):
            account.write(name)
    except FsdpcheckError as error:
        lacks.append(visible(str(error)))
    if session.exitstatus == 0:
        if lacks:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif _in_vain(config):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR


def _required(config: pytest.Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Globs that --fsdpcheck-require gives, and the names of all laws, where there are any globs."""
    require = options.globs(config.getoption("--fsdpcheck-require"))
    if not require:
        return (), ()
    from fsdpcheck.judging import registry

    return require, tuple(registry.chapters())


def _in_vain(config: pytest.Config) -> bool:
    """Was an adapter named, and none of the laws that were asked of it promised?"""
    account = config.stash[_ACCOUNT]
    return bool(config.getoption("--fsdpcheck-adapter") and account.verdicts and not account.promises)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    account, lacks = config.stash[_ACCOUNT], config.stash[_LACKS]
    used = [*_world.summary(account.ranks)]
    if not account.promises and not account.verdicts and not lacks and not used:
        return
    terminalreporter.section("fsdpcheck")
    for sentence in used:
        terminalreporter.line(sentence)
    if config.option.collectonly:
        terminalreporter.line(f"{account.promises} checks promised; none is run to collect them")
        return
    for sentence in account.lines(config.stash[_PLAN]) if account.promises or account.verdicts else ():
        terminalreporter.line(sentence)
    for sentence in _red(config):
        terminalreporter.line(visible(sentence), red=True)


def _red(config: pytest.Config) -> list[str]:
    """Why the session is red whatever its tests are, a sentence each."""
    lacks = config.stash[_LACKS]
    return [*lacks] if lacks or not _in_vain(config) else [_VAIN]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say it on the last line, for pytest's own one counts tests alone, all of which may have passed."""
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and _LACKS in config.stash and (red := _red(config)):
        more = f" ({len(red) - 1} more above)" if red[1:] else ""
        terminal.write_line(visible(f"fsdpcheck: red, whatever the tests are: {red[0]}{more}"), red=True)


def _bound(item: object) -> own_tests.BoundLaw | None:
    """The law that a test of a user's own was given."""
    found = getattr(getattr(item, "callspec", None), "params", {}).get("law")
    return found if isinstance(found, own_tests.BoundLaw) else None


def _name(item: pytest.Item) -> str:
    """The name of the law that is checked by a test; "" where it is none."""
    bound, law = _bound(item), _law_of(getattr(item, "obj", None))
    return bound.law if bound is not None else law.name if law is not None else ""


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
