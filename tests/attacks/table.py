"""The attacks as a table: what each does, how it comes in, and what must come of it, written before any was run.

``{here}`` in an argument is the folder of this file, ``{tmp}`` the empty folder that the commands run in. Of several
commands the last one is judged; ``prepare`` is called with that folder before the first, ``between`` before the last.
``expected`` stands as it was written; ``mended`` is what is expected since, where docs/attacks.md says why.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
Way = Literal["run", "processes", "pytest", "replay", "resume", "model"]

HOLDS = frozenset({0})
FINDING = frozenset({1})
REFUSED = frozenset({2})
STUCK = frozenset({4})


def nothing(folder: Path) -> None:
    """Nothing to prepare."""


@dataclass(frozen=True)
class Attack:
    """One row. ``says``: a word that the output must hold; ``stdin``: it stays open and silent."""

    name: str
    what: str
    way: Way
    commands: tuple[tuple[str, ...], ...]
    expected: frozenset[int]
    says: str = ""
    stdin: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    prepare: Callable[[Path], None] = nothing
    between: Callable[[Path], None] = nothing
    daily: bool = False
    mended: frozenset[int] | None = None

    @property
    def wanted(self) -> frozenset[int]:
        """The codes that are right."""
        return self.expected if self.mended is None else self.mended

    @property
    def kind(self) -> str:
        return "holds" if self.wanted == HOLDS else "does not hold"


def run(file: str, name: str, law: str, world: str, *more: str) -> tuple[str, ...]:
    """The command that checks an adapter of these files by some laws."""
    return ("run", "--adapter", f"{{here}}/{file}.py:{name}", "--law", law, "--world-size", world, *more)


def broken(name: str, what: str, law: str, world: str, *more: str, way: Way = "run", says: str = "v2:") -> Attack:
    """A broken implementation, which must be found, with a token."""
    command = run("attack_broken", name, law, world, *more)
    return Attack(name, what, way, (command,), FINDING, says=says)


def honest(name: str, what: str, law: str = "training.plain,training.gradients", world: str = "2-3") -> Attack:
    """An honest implementation, which must hold."""
    return Attack(name, what, "run", (run("attack_honest", name, law, world),), HOLDS)


def ends(name: str, what: str, expected: frozenset[int], *more: str, says: str = "", stdin: bool = False) -> Attack:
    """One that tries to keep the session from ending, or to lose its findings."""
    command = run("attack_ends", name, "training.plain", "2", *more)
    return Attack(name, what, "run", (command,), expected, says=says, stdin=stdin)


def model(
    name: str, what: str, expected: frozenset[int], *more: str, environment: tuple[tuple[str, str], ...] = ()
) -> Attack:
    """A user's own model on fully_shard."""
    source = "{here}/attack_models.py"
    command = ("run", "--model", f"{source}:{name}", "--batch", f"{source}:batch", "--adapter", "fully_shard")
    commands = ((*command, "--law", "training.plain", "--world-size", "2", *more),)
    return Attack(name, what, "model", commands, expected, environment=environment)


def edit_the_report(folder: Path) -> None:
    """Turn what the report says of the law into a pass, by hand."""
    path = folder / "report.json"
    text = path.read_text()
    tokens = re.sub(r"v2:[A-Za-z0-9_=-]+", "", text)
    path.write_text(re.sub(r'"(fails|failed|finding|found|violated|fail)"', '"holds"', tokens))


def symbolic_loop(folder: Path) -> None:
    """Two links that name each other."""
    os.symlink("b.json", folder / "a.json")
    os.symlink("a.json", folder / "b.json")


def a_file_in_the_way(folder: Path) -> None:
    """A file where a folder would have to be."""
    (folder / "file").write_text("")


def other_version(folder: Path) -> None:
    """A report that no version of the checker wrote."""
    (folder / "report.json").write_text(json.dumps({"version": 99, "format": 99, "tokens": ["v2:AAAA"]}))


def binary_journal(folder: Path) -> None:
    """A file of bytes that are no text, with what begins like a token."""
    (folder / "journal").write_bytes(b"\xff\xfe\x00 v2:\x80\x81AAAA v2:AAAA= v2:" + b"A" * 100000 + bytes(range(256)))


def odd_place(folder: Path) -> None:
    """The broken adapter under a name with spaces and letters beyond ASCII."""
    place = folder / "ordner mit leer" / "äöü 改"
    place.mkdir(parents=True)
    (place / "train adäpter.py").write_text((HERE / "attack_ends.py").read_text())


ODD = "{tmp}/ordner mit leer/äöü 改/train adäpter.py:unreduced"
QUICK = ("--no-confirm",)
ONE = ("--no-confirm", "--jobs", "1")
UNREDUCED = run("attack_ends", "unreduced", "training.plain", "2", *QUICK, "--json", "report.json")

BROKEN = (
    broken("mended_when_shown", "averages parameters only when they are shown", "training.plain", "2"),
    broken("third_rank_forgotten", "wrong on three ranks only, in biases only", "training.plain", "1-3", *QUICK),
    broken("third_micro_batch_forgotten", "drops what comes after two micro-batches", "training.*", "2", *QUICK),
    broken("mean_over_busy_ranks", "wrong when a rank has no samples", "training.plain", "2-3", *QUICK),
    broken(
        "halved_on_the_wire",
        "sends float32 as bfloat16",
        "training.plain,training.gradients,rounding.gradients,rounding.update",
        "2",
        *QUICK,
    ),
    broken("late_leak", "adds the first step's bias gradient from the third step on", "training.*", "2", *QUICK),
    broken("remembered", "reuses gradients of earlier trainings", "training.plain,invariance.repeated", "2", *QUICK),
    broken(
        "right_when_simulated",
        "leaves the last parameter out where ranks are processes",
        "training.plain",
        "2",
        "--engine",
        "processes",
        way="processes",
    ),
    broken(
        "shows_what_it_did_not_use",
        "shows a right gradient, uses another",
        "training.plain,training.gradients,rounding.gradients,rounding.update",
        "2",
        *QUICK,
    ),
    broken("clips_by_weights_alone", "reports right norms, clips by others", "clipping.*,training.*", "2", *QUICK),
    broken("live_on_the_last_rank", "shows live memory, on the last rank only", "lifecycle.copies", "2", *QUICK),
    broken("shows_the_first_step", "shows stale gradients", "training.gradients", "2", *ONE),
    broken("waits_too_late", "waits for its collectives after it has used their results", "training.plain", "2"),
    broken("ordered_by_samples", "orders its collectives by its number of samples", "collectives.plain", "2-3"),
    broken("through_one_memory", "reduces through a table that real ranks would not share", "training.plain", "2"),
)

HONEST = (
    honest("odd_buckets", "buckets that cut through parameters"),
    honest("waits_late", "asynchronous sums, waited for last to first, and barriers"),
    honest("reduce_and_broadcast", "reduces to an owner, which broadcasts"),
    honest("objects", "pickled lists in place of tensors"),
    honest("ring", "a ring of sends and receives in a group of its own"),
    honest("noisy", "prints, warns, logs, locks, caches, sets flags and starts a thread"),
    honest("as_bytes", "gathers bytes, adds up in float64"),
    honest("all_to_all", "padded all-to-all and gather", world="3"),
    honest("vectorised", "per-sample gradients by vmap", "clipping.norms,training.private-clipped", "2"),
)

ENDS = (
    ends("leaves_with_zero", "wrong, and ends the process with 0 at exit", FINDING, *ONE, says="v2:"),
    ends("exits_in_a_step", "ends the process with 0 in the second step", frozenset({1, 2}), *QUICK),
    ends("cannot_be_stopped", "retries a hopeless collective whatever is raised", FINDING, *QUICK, says="v2:"),
    ends("spins_for_ever", "ignores signals and spins", STUCK, "--budget", "15", *QUICK),
    ends("leaves_a_child", "leaves a child that holds stdout", HOLDS),
    replace(
        ends("asks", "reads a line that nobody types", frozenset({1, 4}), "--budget", "15", *QUICK, stdin=True),
        mended=HOLDS,  # stdin is empty in a checked session, so that the line is read at once
    ),
    ends("too_deep", "uses the C stack up", frozenset({1, 2}), *QUICK),
    ends("never_joined", "leaves a thread that never ends, and a finaliser that sleeps", HOLDS),
    ends("closes_the_output", "wrong; fakes a verdict and closes stdout", FINDING, *ONE, says="v2:"),
    Attack(
        "sneaks_into_pytest",
        "wrong; replaces sys.exit, in a pytest session",
        "pytest",
        (
            (
                "pytest",
                *("-p", "fsdpcheck.pytest_plugin", "-p", "no:cacheprovider", "--pyargs", "fsdpcheck.properties", "-x"),
                *("--fsdpcheck-adapter", "{here}/attack_ends.py:sneaks", "-k", "training"),
            ),
        ),
        FINDING,
    ),
)

FILES = (
    Attack(
        "file_in_the_way",
        "writes the report below a file",
        "run",
        ((*UNREDUCED[:-1], "file/report.json"),),
        REFUSED,
        prepare=a_file_in_the_way,
        daily=True,
    ),
    Attack(
        "symbolic_loop",
        "writes the report through links that name each other",
        "run",
        ((*UNREDUCED[:-1], "a.json"),),
        REFUSED,
        prepare=symbolic_loop,
    ),
    Attack(
        "edited_report",
        "resumes a report whose finding was made a pass by hand",
        "resume",
        (UNREDUCED, (*UNREDUCED, "--resume")),
        REFUSED,
        between=edit_the_report,
    ),
    Attack(
        "other_version",
        "resumes a report of no known version",
        "resume",
        ((*UNREDUCED, "--resume"),),
        REFUSED,
        prepare=other_version,
    ),
    Attack(
        "binary_journal", "replays bytes with pieces of tokens", "replay", (("replay", "journal"),), REFUSED,
        prepare=binary_journal,
    ),
    Attack(
        "odd_place",
        "an adapter under a path with spaces and letters beyond ASCII, replayed from its report",
        "replay",
        (
            ("run", "--adapter", ODD, *UNREDUCED[3:]),
            ("replay", "report.json", "--adapter", ODD),
        ),
        FINDING,
        prepare=odd_place,
    ),
)  # fmt: skip

MODELS = (
    model("counts", "doubles every third output", REFUSED),
    model("size_matters", "divides by the number of samples", REFUSED),
    model("rolls", "adds a random number", REFUSED),
    model("casts", "casts to float64 and back, exactly", frozenset({0, 2})),
    model("shared", "build() gives the same module every time", HOLDS),
    model(
        "stack",
        "its import changes folder, default dtype, seed, warnings and arguments",
        HOLDS,
        "--json",
        "report.json",
        environment=(("ATTACK_IMPORT", "1"),),
    ),
)

ATTACKS = (*BROKEN, *HONEST, *ENDS, *FILES, *MODELS)
