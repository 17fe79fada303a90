"""`fsdpcheck init`: an adapter to begin with, settings and a CI workflow, written into a repository."""

from __future__ import annotations

import argparse
import tomllib
from importlib import metadata, resources
from pathlib import Path
from typing import Final

from fsdpcheck.cli.settings import TABLE
from fsdpcheck.errors import HOLDS, UsageError, explain, reading

_KINDS: Final = {
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel, flat parameters",
    "fsdp2": "fully_shard",
    "private": "an engine that clips each sample and adds noise (DP-SGD)",
    "step": "a step that is written by hand",
}
_ADAPTER: Final = Path("fsdpcheck_adapter.py")
_WORKFLOW: Final = Path(".github/workflows/fsdpcheck.yml")
_PROJECT: Final = Path("pyproject.toml")
_SETTINGS: Final = f"""[{TABLE}]
adapter = ["{_ADAPTER}:adapter"]
profile = "quick"
"""
_EPILOG: Final = "kinds:\n" + "\n".join(f"  {kind:<7} {what}" for kind, what in _KINDS.items())


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    init = commands.add_parser(
        "init",
        help="write an adapter, settings and a CI workflow to begin with",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    init.set_defaults(command=_init)
    init.add_argument("kind", metavar="KIND", choices=_KINDS, help="what is to be checked: " + ", ".join(_KINDS))
    init.add_argument("--no-workflow", action="store_true", help=f"write no {_WORKFLOW}")


def _init(options: argparse.Namespace) -> int:
    text = reading.text(_PROJECT) if _PROJECT.exists() else ""
    new = {_ADAPTER: _template(options.kind), _PROJECT: text + "\n" * bool(text) + _SETTINGS}
    if not options.no_workflow:
        new[_WORKFLOW] = _template("workflow").replace("TORCH", metadata.version("torch").partition("+")[0])
    _require_new(new, text)
    for path, content in new.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            then = "begin in a folder that can be written"
            raise UsageError(explain(f"{path} cannot be written", got=error, then=then)) from error
        print(f"{path}: {'the table ' + TABLE + ' added' if path == _PROJECT and text else 'written'}")
    print(f"next: fsdpcheck gate --update    (then make the adapter yours: {_ADAPTER})")
    return HOLDS


def _require_new(new: dict[Path, str], project: str) -> None:
    """Raise UsageError rather than write over what is there."""
    there = [str(path) for path in new if path != _PROJECT and path.exists()]
    try:
        table = tomllib.loads(project).get("tool", {}).get("fsdpcheck")
    except tomllib.TOMLDecodeError as error:
        raise UsageError(explain(f"{_PROJECT} is no TOML", got=error, then="mend it first")) from error
    there += [f"[{TABLE}] in {_PROJECT}"] * (table is not None)
    if there:
        then = "move them away, or go on with them: fsdpcheck gate"
        raise UsageError(
            explain("something is there already, and nothing was written", got=", ".join(there), then=then)
        )


def _template(name: str) -> str:
    return (resources.files("fsdpcheck.cli") / "templates" / f"{name}.txt").read_text("utf-8")
