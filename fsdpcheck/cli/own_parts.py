"""``--parallelize`` and what goes with it: the parts of a user's own training, as the reference of one adapter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fsdpcheck.errors import UsageError, explain


def add(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parts = parser.add_argument_group("your own parts (docs/user-models.md)")
    parts.add_argument(
        "--parallelize", default="", metavar="NAME", help="parallelize(model, mesh), your own (default: an adapter)"
    )
    parts.add_argument(
        "--step", default="", metavar="NAME", help="step(model, optimizer, batches, loss) (default: an ordinary loop)"
    )
    parts.add_argument("--clip", default="", metavar="NAME", help="clip(model, max_norm) -> norm (default: torch's)")
    parts.add_argument("--mesh", default="", metavar="AXES", help="its axes: dp_shard,tp (default: dp_shard)")
    parts.add_argument(
        "--averaging", default="", metavar="WHEN", help="divides by ranks before or after it sums (default: after)"
    )


def adapters_of(options: argparse.Namespace) -> Sequence[str]:
    """The adapters that are asked for, one of parts among them. Raises UsageError for parts that make none."""
    given = {name: getattr(options, name) for name in ("step", "clip", "mesh", "averaging") if getattr(options, name)}
    if not options.parallelize:
        if given:
            raise UsageError(f"--{next(iter(given))} goes with --parallelize; next: name the function that shards")
        return list(options.adapter)
    module, colon, _ = options.parallelize.rpartition(":")
    if not colon:
        what, then = "--parallelize names no function", "write train.py:parallelize"
        raise UsageError(explain(what, got=options.parallelize, wanted="file.py:name or pkg.mod:name", then=then))
    reference = options.parallelize
    for name in ("step", "clip"):
        if name in given:
            reference += f",{name}={_in(module, name, given[name])}"
    if "mesh" in given:
        reference += f",axes={given['mesh'].replace(',', '+')}"
    if "averaging" in given:
        reference += f",averaging={given['averaging']}"
    return [*options.adapter, reference]


def _in(module: str, option: str, reference: str) -> str:
    """The name of a function in the module of the parallelize function."""
    where, colon, name = reference.rpartition(":")
    if colon and where != module:
        what, then = f"--{option} is in another module than --parallelize", f"import it there: {module}:{name}"
        raise UsageError(explain(what, got=reference, wanted=f"{module}:{name}", then=then))
    return name
