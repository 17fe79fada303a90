"""``--model`` and ``--parallelize`` with what goes with them: a user's own model, and the parts of their own training,
as the reference of one adapter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fsdpcheck.errors import UsageError, explain

_FUNCTIONS = ("step", "clip", "private", "save", "load", "read")
_WORDS = {
    "mesh": "axes", "averaging": "averaging", "load_at": "load-at",
    "keeps": "keeps", "factor": "factor", "shows": "shows",
    "param_dtype": "param-dtype", "reduce_dtype": "reduce-dtype",
}  # fmt: skip
"""Option -> what a reference to parts calls it (adapters/user_parts.py)."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """References to a user's own model; a replay imports them only when they are given here."""
    parser.add_argument(
        "--model", default="", metavar="NAME", help="cases on your own model: build() -> nn.Module (default: none)"
    )
    parser.add_argument(
        "--batch", default="", metavar="NAME", help="its data: batch(n) -> (inputs, targets) (default: none)"
    )
    parser.add_argument(
        "--loss", default="", metavar="NAME", help="its loss: loss(outputs, targets) -> [n] (default: built in)"
    )
    parser.add_argument(
        "--optimizer", default="", metavar="NAME", help="its optimizer(model), for plain training (default: drawn)"
    )


def require_model(options: argparse.Namespace) -> None:
    """Raises UsageError for options about a model that is not named."""
    if options.model and not options.batch:
        raise UsageError("--model needs --batch: pkg.mod:batch or file.py:batch, called as batch(n)")
    given = [name for name in ("batch", "loss", "optimizer", "units", "real") if getattr(options, name, None)]
    if given and not options.model:
        raise UsageError(f"--{given[0]} is about a model of your own; next: name it with --model")


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
    parts.add_argument(
        "--private", default="", metavar="NAME", help="a step that clips each sample, with --factor (default: none)"
    )
    parts.add_argument(
        "--factor", default="", metavar="RULE", help="its clip factor: reciprocal,1e-6,flat (default: none)"
    )
    parts.add_argument("--shows", default="", metavar="WORDS", help="what it returns: norms,factors (default: none)")
    parts.add_argument(
        "--save", default="", metavar="NAME", help="save(model, optimizer, folder), with --load (default: none)"
    )
    parts.add_argument(
        "--load", default="", metavar="NAME", help="load(model, optimizer, folder), with --save (default: none)"
    )
    parts.add_argument(
        "--read", default="", metavar="NAME", help="read(model, folder) into an ordinary model (default: none)"
    )
    parts.add_argument(
        "--load-at", default="", metavar="RANKS", help="numbers of ranks that read it: any, same (default: any)"
    )
    parts.add_argument("--mesh", default="", metavar="AXES", help="its axes, as dp_shard,tp (default: dp_shard)")
    parts.add_argument(
        "--keeps", default="", metavar="WHAT", help="what a rank keeps: shards; units at work (default: not said)"
    )
    parts.add_argument(
        "--param-dtype",
        default="",
        metavar="DTYPE",
        help="what the model computes in: float32, bfloat16, autocast (default: any)",
    )
    parts.add_argument(
        "--reduce-dtype", default="", metavar="DTYPE", help="what gradients are reduced in: float32 (default: any)"
    )
    parts.add_argument(
        "--averaging",
        default="",
        metavar="WHEN",
        help="divides by ranks before or after it sums, or none: it only sums (default: after)",
    )


def adapters_of(options: argparse.Namespace) -> Sequence[str]:
    """The adapters that are asked for, one of parts among them. Raises UsageError for parts that make none."""
    given = {name: getattr(options, name) for name in (*_FUNCTIONS, *_WORDS) if getattr(options, name)}
    if not options.parallelize:
        if given:
            raise UsageError(
                f"--{next(iter(given)).replace('_', '-')} goes with --parallelize; next: name the function that shards"
            )
        return list(options.adapter)
    module, colon, _ = options.parallelize.rpartition(":")
    if not colon:
        what, then = "--parallelize names no function", "write train.py:parallelize"
        raise UsageError(explain(what, got=options.parallelize, wanted="file.py:name or pkg.mod:name", then=then))
    reference = options.parallelize
    for name in _FUNCTIONS:
        if name in given:
            reference += f",{name}={_in(module, name, given[name])}"
    for name, word in _WORDS.items():
        if name in given:
            reference += f",{word}={given[name].replace(',', '+')}"
    return [*options.adapter, reference]


def _in(module: str, option: str, reference: str) -> str:
    """The name of a function in the module of the parallelize function."""
    where, colon, name = reference.rpartition(":")
    if colon and where != module:
        what, then = f"--{option} is in another module than --parallelize", f"import it there: {module}:{name}"
        raise UsageError(explain(what, got=reference, wanted=f"{module}:{name}", then=then))
    return name
