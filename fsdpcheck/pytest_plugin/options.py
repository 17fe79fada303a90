"""The plugin's options: those of ``fsdpcheck run`` under longer names, and the plan that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from fsdpcheck import adapters
from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.engines._common import metal
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.pytest_plugin import world
from fsdpcheck.session.plan import Plan, parse_globs, parse_traits, parse_world_sizes

_OWN = {
    "model": "cases on your own model: build() -> nn.Module (default: none)",
    "batch": "its data: batch(n) -> (inputs, targets) (default: none)",
    "loss": "its loss: loss(outputs, targets) -> [n] (default: built in)",
    "optimizer": "its optimizer(model), for plain training (default: drawn)",
}


def add(parser: pytest.Parser) -> None:
    """Add them."""
    group = parser.getgroup("fsdpcheck", "fsdpcheck: laws of sharded training")
    what = (
        "check this implementation: a built-in name, pkg.mod:attr or file.py:attr; repeatable (default: the main job's)"
    )
    group.addoption("--fsdpcheck-adapter", action="append", default=[], metavar="NAME", help=what)
    laws = "only laws that match, such as 'norms.*,state.*'; repeatable (default: all)"
    group.addoption("--fsdpcheck-law", action="append", default=[], metavar="GLOBS", help=laws)
    avoid = "draw no such case: tied,frozen (default: none)"
    group.addoption("--fsdpcheck-avoid", default="", metavar="TRAITS", help=avoid)
    engine, profile = "how ranks are had (default: simulated)", "cases a law: quick, ci, nightly (default: quick)"
    group.addoption("--fsdpcheck-engine", choices=("simulated", "processes"), default="simulated", help=engine)
    device = "where tensors of ranks lie (default: cpu)"
    group.addoption("--fsdpcheck-device", choices=get_args(metal.Device), default="cpu", help=device)
    backend = "what real ranks speak over (default: nccl on GPUs, else gloo)"
    group.addoption("--fsdpcheck-backend", choices=("gloo", "nccl"), default=None, help=backend)
    group.addoption("--fsdpcheck-profile", choices=tuple(PROFILES), default="quick", help=profile)
    group.addoption("--fsdpcheck-world-size", default="", metavar="1-5", help="3, 1-5 or 2,13 (default: 1-5 in quick)")
    seed, budget = (
        "draw other cases than everybody's (default: 0)",
        "draw no further case after so long (default: none)",
    )
    group.addoption("--fsdpcheck-seed", type=int, default=0, metavar="N", help=seed)
    group.addoption("--fsdpcheck-budget", default="", metavar="SECONDS", help=budget)
    confirm = "do not run findings again on real gloo processes"
    group.addoption("--fsdpcheck-no-confirm", action="store_true", default=False, help=confirm)
    for name, words in _OWN.items():
        group.addoption(f"--fsdpcheck-{name}", default="", metavar="NAME", help=words)
    units = "modules of the model to shard: a,b (default: the blocks)"
    group.addoption("--fsdpcheck-units", default="", metavar="NAMES", help=units)
    real = "your model as it is, own weights, by the rounding laws"
    group.addoption("--fsdpcheck-real", action="store_true", default=False, help=real)
    require = "fail unless each law that matches is promised and judged; repeatable (default: none)"
    group.addoption("--fsdpcheck-require", action="append", default=[], metavar="GLOBS", help=require)
    base = "fail where less is judged than this baseline of `fsdpcheck gate` has (default: none)"
    group.addoption("--fsdpcheck-baseline", default="", metavar="FILE", help=base)
    as_json = "write all that was judged as JSON (default: none)"
    group.addoption("--fsdpcheck-json", default="", metavar="FILE", help=as_json)
    ranks = f"ranks of the fixture world: {', '.join(world.KINDS)} (default: simulated, or what ini says)"
    group.addoption(world.OPTION, choices=world.KINDS, default=None, help=ranks)
    parser.addini(world.INI, f"{ranks}; {world.OPTION} comes first", default=world.KINDS[0])
    waits = "seconds after which gloo gives up on real ranks of the fixture world (default: 60)"
    parser.addini(world.TIMEOUT, waits, default="60")


def plan(config: pytest.Config) -> Plan:
    """What the options ask for. Raises UsageError for what cannot be read, and for a file that could not be written."""

    def given(name: str) -> Any:
        return config.getoption(f"--fsdpcheck-{name}")

    asked, sizes, avoid, units = (given(name) for name in ("adapter", "world-size", "avoid", "units"))
    own = {name: given(name) for name in _OWN}
    if own["model"] and not own["batch"]:
        raise UsageError("--fsdpcheck-model needs --fsdpcheck-batch: pkg.mod:batch or file.py:batch")
    about = [name for name in ("batch", "loss", "optimizer", "units", "real") if given(name)]
    if about and not own["model"]:
        raise UsageError(f"--fsdpcheck-{about[0]} is about a model of your own; next: name it with --fsdpcheck-model")
    _require_writable(given("json"))
    return Plan(
        adapters=tuple(dict.fromkeys(asked)) or adapters.default_names(),
        laws=globs(given("law")) or ("*",),
        engine=metal.kind_of(given("engine"), given("device"), given("backend")),
        world_sizes=parse_world_sizes(sizes) if sizes else (),
        profile=given("profile"),
        seed=given("seed"),
        budget=_seconds(given("budget")),
        confirm=not given("no-confirm"),
        avoid=parse_traits(avoid) if avoid else (),
        units=tuple(name.strip() for name in units.split(",") if name.strip()) if units else None,
        real=given("real"),
        **own,
    )


def globs(given: list[str]) -> tuple[str, ...]:
    """Globs over names of laws, of a repeated option."""
    return tuple(glob for each in given for glob in parse_globs(each))


def _seconds(text: str) -> float | None:
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise UsageError(explain("--fsdpcheck-budget is no time", got=text, wanted="a number of seconds above 0"))
    return seconds


def _require_writable(name: str) -> None:
    if name and (not Path(name).absolute().parent.is_dir() or Path(name).is_dir()):
        wanted = "the name of a file in a folder that is there"
        raise UsageError(explain("--fsdpcheck-json cannot be written", got=name, wanted=wanted))
