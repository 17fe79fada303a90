"""``fsdpcheck list``: what there is, and what laws state in full."""

from __future__ import annotations

import argparse

from fsdpcheck.cli import values
from fsdpcheck.errors import HOLDS, UsageError
from fsdpcheck.session.plan import parse_globs

_LISTED = ("adapters", "laws", "promises", "faults", "engines", "traits")

_EPILOG = """examples:
  fsdpcheck list laws                                  what each law guarantees, in a line
  fsdpcheck list laws 'norms.*'                        what they ask of an adapter, cannot see, and their sources
  fsdpcheck list promises                              what an adapter can promise, and how many laws rest on each
  fsdpcheck list traits                                what cases demand, and which adapters accept it
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "list",
        help=f"what there is: {', '.join(_LISTED)}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_list)
    values.one_of(parser, "what", _LISTED, f"{', '.join(_LISTED)} (default: the names of all)", nargs="?")
    whole = "laws to state in full, such as 'norms.*,state.*' (default: all, a line each)"
    parser.add_argument("globs", nargs="?", metavar="GLOBS", help=whole)


def _list(options: argparse.Namespace) -> int:
    from fsdpcheck.report import listing
    from fsdpcheck.report.columns import width_of_terminal

    what, globs, width = options.what, options.globs, width_of_terminal()
    if globs is None:
        print(listing.text(what, width) if what else listing.overview(width))
    elif what == "laws":
        print(listing.statements(parse_globs(globs), width))
    else:
        got = f"got {globs!r} behind {what!r}"
        raise UsageError(f"{got}; wanted GLOBS behind 'laws' alone; next: leave them out")
    return HOLDS
