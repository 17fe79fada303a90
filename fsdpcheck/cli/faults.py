"""``fsdpcheck faults``: faults and source mutants put to the laws; which law kills which, and what survives."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.cli import values
from fsdpcheck.errors import FINDING, HOLDS, UsageError, explain, reading, writing
from fsdpcheck.report import colour
from fsdpcheck.session import sharding
from fsdpcheck.session.plan import parse_globs

if TYPE_CHECKING:
    from fsdpcheck.studies.faults.matrix import Matrix, Row
    from fsdpcheck.studies.faults.origins import Planted

_EPILOG = """examples:
  fsdpcheck faults                                       every planted fault of the reference, until a law kills it
  fsdpcheck faults --fault '*norm*' --every              all laws on some of them: which kills which, which alone
  fsdpcheck faults --adapter fsdp.py:adapter --mutants 100 --keep rows.jsonl
                                                         100 changes of your own lines; what no law of yours sees
  fsdpcheck faults --adapter fsdp.py:adapter --from my_faults.py
                                                         faults of your own: context managers that patch your code
exit codes: 0 each that takes effect is killed, or said to be equivalent   1 some survive   2 usage or adapter error
"""
_MUTATED = ("reference", "reference_fsdp2", "reference:bookkeeping")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "faults",
        help="plant faults, or mutants of your source, and show which law kills which",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_faults)
    option = parser.add_argument
    option(
        "--adapter", action="append", default=[], metavar="NAME",
        help="an implementation that holds its laws, repeatable (default: that in which each fault is planted)",
    )  # fmt: skip
    option("--law", default="*", metavar="GLOBS", help="laws that judge, such as 'norms.*,state.*' (default: all)")
    option("--fault", default="*", metavar="GLOB", help="faults whose names match (default: all)")
    option("--from", dest="module", metavar="MODULE", help="faults of your own: pkg.mod or file.py (default: none)")
    option("--mutants", type=values.count, metavar="N", help="N changes of single places of the source (default: none)")
    option(
        "--file",
        dest="files",
        default="*",
        metavar="GLOB",
        help="files that mutants change (default: all of the implementation)",
    )
    option(
        "--pairs",
        type=values.count,
        metavar="N",
        help="N pairs of them at once: one may hide another (default: none)",
    )
    option("--seed", type=int, default=0, metavar="S", help="by which mutants and pairs are drawn (default: 0)")
    values.one_of(parser, "--profile", tuple(PROFILES), "how many cases a law (default: quick)", "quick")
    option("--cases", type=values.count, metavar="N", help="at most N cases a law (default: those of the profile)")
    option(
        "--world-size",
        type=values.world_sizes,
        default=(),
        metavar="1-5",
        help="3, 1-5 or 2,4 (default: of the profile)",
    )
    option("--every", action="store_true", help="ask every law, also after a kill (default: no)")
    option("--shard", default="1/1", metavar="K/N", help="the K-th part of N of the faults (default: 1/1)")
    option(
        "--keep",
        type=Path,
        metavar="FILE",
        help="rows as they come; those of the same code are not judged again (default: none)",
    )
    option(
        "--equivalent",
        type=Path,
        metavar="FILE",
        help="JSON of survivors that change nothing anybody may see: name to reason (default: none)",
    )
    option("--json", type=Path, metavar="FILE", help="write the rows as JSON too (default: none)")
    option("--markdown", type=Path, metavar="FILE", help="write them as a Markdown document too (default: none)")
    option("--html", type=Path, metavar="FILE", help="write them as a page too (default: none)")


def _faults(options: argparse.Namespace) -> int:
    import torch

    from fsdpcheck.report import faults as report
    from fsdpcheck.report import writing as forms
    from fsdpcheck.session.run import chosen_laws
    from fsdpcheck.studies.faults.matrix import Matrix
    from fsdpcheck.studies.faults.rows import Kept

    torch.set_num_threads(1)
    number, many = sharding.parse(options.shard)
    equivalent = _equivalent(options.equivalent)
    files = {form: getattr(options, form) for form in ("json", "markdown", "html") if getattr(options, form)}
    forms.require(files)
    wanted = ("adapter", "law", "module", "profile", "cases", "world_size", "every")
    asked = {name: getattr(options, name) for name in wanted}
    kept, rows = Kept(options.keep, asked), []
    globs = parse_globs(options.law)
    chosen_laws(globs)  # or there is one that none matches
    matrix = Matrix(globs, options.profile, options.cases, options.world_size, options.every)
    try:
        mine = _planted(options, matrix)[number - 1 :: many]
        for row in _judged(mine, matrix, kept):
            rows.append(row)
            print(report.progress(row, len(rows), len(mine)), file=sys.stderr, flush=True)
    finally:
        matrix.engine.close()
        if rows:  # also of a study that was interrupted
            print(report.text(rows, colour.painter(sys.stdout), equivalent), flush=True)
            _write(files, rows, {**asked, "seed": options.seed, "shard": options.shard}, equivalent)
    return FINDING if any(row.outcome == "survived" and row.fault not in equivalent for row in rows) else HOLDS


def _judged(planted: Sequence[Planted], matrix: Matrix, kept: Any) -> Iterator[Row]:
    for one in planted:
        row = kept[one.name]
        if row is None:
            row = matrix.row(one)
            kept.add(row, matrix.files)
        yield row


def _planted(options: argparse.Namespace, matrix: Matrix) -> list[Planted]:
    """What is put to the laws. Raises UsageError where nothing is."""
    from fsdpcheck.studies.faults import origins

    adapters = options.adapter
    if options.mutants and options.module:
        raise UsageError(explain("--mutants and --from", got="both", wanted="one of the two"))
    if options.mutants:
        found = _mutants(options, matrix, adapters or list(_MUTATED))
    elif options.module:
        if not adapters:
            raise UsageError(explain("--from needs to know which implementation", then="name it: --adapter NAME"))
        found = origins.of_module(options.module, options.fault, adapters)
    else:
        found = origins.of_the_reference(options.fault, adapters)
    if options.pairs:
        found = origins.pairs(found, options.pairs, options.seed)
    if not found:
        where = f" in {', '.join(adapters)}" if adapters else ""
        then = "`fsdpcheck list faults` shows all; --from FILE.py has your own, --mutants N changes any source"
        raise UsageError(explain(f"no fault matches {options.fault!r}{where}", then=then))
    return found


def _mutants(options: argparse.Namespace, matrix: Matrix, adapters: Sequence[str]) -> list[Planted]:
    from fsdpcheck.studies.faults import coverage, mutants, origins
    from fsdpcheck.studies.faults.sources import Sources

    def told(adapter: str, law: str) -> None:
        print(f"lines of {adapter} that {law} runs", file=sys.stderr, flush=True)

    lines = coverage.measure(matrix, adapters, told)
    found = [
        one for one in mutants.all_of(lines, Sources(adapters, options.files)) if fnmatchcase(one.name, options.fault)
    ]
    drawn = mutants.drawn(found, options.mutants, options.seed)
    print(f"{len(drawn)} of {len(found)} mutants of the lines that cases run", file=sys.stderr, flush=True)
    return origins.of_mutants(drawn, adapters)


def _equivalent(path: Path | None) -> dict[str, str]:
    """Name -> reason. Raises UsageError for a file that does not hold that."""
    if path is None:
        return {}
    wanted = "JSON: name of a fault to reason"
    try:
        found = json.loads(reading.text(path))
    except ValueError as error:
        raise UsageError(explain(f"--equivalent {path}", got=error, wanted=wanted)) from error
    if not isinstance(found, dict) or not all(isinstance(reason, str) and reason.strip() for reason in found.values()):
        raise UsageError(explain(f"--equivalent {path}", got="something else", wanted=wanted))
    return found


def _write(
    files: Mapping[str, Path], rows: Sequence[Row], asked: Mapping[str, Any], equivalent: dict[str, str]
) -> None:
    from fsdpcheck.report import faults as report

    for form, file in files.items():
        if form == "json":
            told = json.dumps(report.data(rows, asked, equivalent), indent=1) + "\n"
        elif form == "markdown":
            told = report.markdown(rows, equivalent)
        else:
            from fsdpcheck.report.page import faults as page

            told = page.text(rows, equivalent)
        writing.whole(file, told)
