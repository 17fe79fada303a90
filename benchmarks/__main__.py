"""``python -m benchmarks [STUDY [ARGUMENT ...]]``: ratios against peers, and studies of what the harness finds."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import warnings
from collections.abc import Iterable
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

STUDIES: Final[dict[str, tuple[str, str, str]]] = {
    "ratios": ("engines", "ratios", "both groups of ratios that follow"),
    "rendezvous": ("engines", "rendezvous_ratios", "a collective call: simulated ranks over torch's threaded group"),
    "engines": ("engines", "engine_ratios", "cases a second: simulated ranks over torch's threads and over processes"),
    "private": ("private_step", "lines", "a private step over a plain one, on the CPU"),
    "kernels": ("kernels", "lines", "kernels over cuBLAS, and their fraction of the floor; on a GPU"),
    "gpu": ("gpu", "lines", "[DEVICE [FILE [ROWS]]]: all that a GPU can say, into docs/gpu.json"),
    "accuracy": ("norm_accuracy", "report", "[SAMPLES LENGTH WIDTH]: errors of squared norms by form and arithmetic"),
    "schedules": ("agreement", "schedules", "[N]: cases that give other bits in reverse order, of N"),
    "processes": ("agreement", "processes", "[N]: cases that gloo processes and simulated ranks disagree on, of N"),
    "deadlocks": ("deadlocks", "reports", "from the last possible move to the report of a deadlock"),
    "metal": ("metal", "lines", "real ranks: from the last move to the report, after a lost rank, against mp.spawn"),
    "acceptance": ("acceptance", "report", "[N]: share of draws proved exact, and floors, by family and type"),
    "steps": ("steps", "report", "[N]: share of cases exact at step 6, by optimizer"),
    "coverage": ("case_coverage", "report", "[N]: facts about cases, and pairs of facts, that N cases a law reach"),
    "branches": (
        "branches",
        "lines",
        "FOLDER [GLOB] [--shard K/N]: branches of the reference that laws reach, into benchmarks/branches.json",
    ),
    "branches-now": ("branches", "now", "[GLOB]: do sessions still reach what they were the first to reach?"),
    "layers": ("exact_layers", "lines", "which layers of torch a user's model may have, and be judged exactly"),
    "selection": ("selection", "lines", "[GLOB]: what cases that are chosen kill and cost, beside ones as drawn"),
    "shrunk": ("case_coverage", "shrunk", "[SEED]: how small the minimal cases of planted faults are"),
    "modes": (
        "modes",
        "lines",
        "[FILE [PROFILE [VARIANT ...]]]: private laws on each mode and way of sharding, W = 1-8",
    ),
    "sessions": (
        "sessions",
        "lines",
        "[MINUTES [FILE]] [--shard K/N]: sessions on implementations that misbehave; each must end and leave nothing",
    ),
    "soak": (
        "soak",
        "lines",
        "[MINUTES [FILE [SEED]]] [--shard K/N]: honest adapters on many cases; each alarm is ours",
    ),
    "communication": (
        "communication.tables",
        "lines",
        "[MINUTES]: what other tools say of 170 pairs of programs, resumable and shared out, beside fsdpcheck",
    ),
    "judged": ("communication.judged", "lines", "[GLOB]: what fsdpcheck says of these pairs, counted strictly"),
    "compared": ("compared.study", "lines", "[GLOB]: what compare says of honest scripts, planted and public bugs"),
    "simulated": (
        "simulated",
        "lines",
        "what a simulated rank costs: as worlds grow, against torchrun, on a large model",
    ),
    "night": ("night", "lines", "[PART ...]: all that the nightly tier holds, in slices, into benchmarks/night.jsonl"),
    "cpus": ("cpus", "lines", "[LAWS [ADAPTERS]]: are verdicts and tokens the same on other CPUs, emulated?"),
    "witnesses": ("witnesses", "lines", "[GLOB]: a case that kills each planted fault, into tests/witnesses.json"),
    "scripts": ("scripts", "lines", "[NAME ...] --in DIR: public scripts on simulated ranks and in processes"),
    "mechanisms": (
        "mechanisms",
        "lines",
        "[FILE [GLOB [LAWS]]] [--shard K/N]: mechanisms of public reports, planted: found, and where",
    ),
    "mutants": ("mutants", "lines", "what became of 300 source mutants of the reference, by the record"),
    "mechanisms-now": ("mechanisms", "now", "[FILE [GLOB]]: what the laws that found them in the record say today"),
    "stories": ("stories", "lines", "[ADAPTERS [LAWS [N [SEED]]]]: what is named as wrong first in right steps"),
    "controls": (
        "controls",
        "lines",
        "[FILE [GLOB [SEED ...]]] [--shard K/N]: right variants that look suspicious; each finding is a false alarm",
    ),
    "implementations": (
        "implementations",
        "lines",
        "[FILE [GLOB [PROFILE]]] [--shard K/N]: what each implementation promises and keeps, honest ones and defects",
    ),
    "side-by-side": (
        "side_by_side.study",
        "lines",
        "[FILE [GLOB]] --in DIR [--shard K/N]: faults in Opacus and fully_shard: found by their own tests, or by laws",
    ),
    "roots": ("planted_roots", "lines", "[PROFILE]: five and eight mistakes in one implementation: which are reported"),
    "before-after": (
        "before_and_after",
        "lines",
        "PYTHON [GLOB]: ten planted mistakes, as printed by an earlier commit and by this one",
    ),
    "terminal-picture": ("terminal_picture", "lines", "a red session as a terminal shows it, into docs/pictures"),
    "diagnosis": ("diagnosis", "reports", "[SEED [FAULT]]: causes named for planted faults, right or wrong"),
}
"""Name -> its module, the function that gives its lines, and what it measures."""
_OPTIONS: Final = ("shard", "list", "status", "tables", "limit_minutes", "folder")


def main() -> None:
    """Run one study, by default both groups of ratios, and print its lines as they come."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Ratios against peers, measured in pairs in one run, and studies of what the harness finds.",
        epilog="studies:\n" + "\n".join(f"  {name:<11} {says}" for name, (_, _, says) in STUDIES.items()),
    )
    parser.add_argument(
        "study", nargs="?", default="ratios", choices=STUDIES, metavar="STUDY", help="by default ratios"
    )
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of the study; each has a default")
    parser.add_argument("--shard", type=_shard, metavar="K/N", help="of a study that is shared out: its K-th part of N")
    parser.add_argument("--list", action="store_true", default=None, help="of a night: its slices, none is run")
    parser.add_argument(
        "--status", action="store_true", default=None, help="of a night or communication: what is on record"
    )
    parser.add_argument("--tables", action="store_true", default=None, help="of compared: those of docs/compare.md")
    parser.add_argument("--limit-minutes", type=float, metavar="M", help="of a night: begin no slice after so long")
    parser.add_argument("--in", dest="folder", metavar="DIR", help="of scripts, side-by-side: where others' files lie")
    asked = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module, function, _ = STUDIES[asked.study]
    arguments = [int(each) if each.isdigit() else each for each in asked.arguments]
    study = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    options = {name: value for name in _OPTIONS if (value := getattr(asked, name)) is not None}
    if unknown := options.keys() - inspect.signature(study).parameters.keys():
        parser.error(f"{asked.study} takes no --{', --'.join(sorted(unknown)).replace('_', '-')}")
    found = study(*arguments, **options)
    lines: Iterable[object] = [found] if isinstance(found, str) else found
    for line in lines:
        print(line, flush=True)


def _shard(text: str) -> tuple[int, int]:
    """(3, 8) from "3/8"."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted K/N with 1 <= K <= N, such as 3/8")
    return int(part), int(parts)


if __name__ == "__main__":
    main()
