"""Runs attacks, and prints what was expected of each and what came: ``python tests/attacks/runner.py [NAME ...]``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from table import ATTACKS, Attack  # noqa: E402

GUARD = 120.0


@dataclass(frozen=True)
class Outcome:
    """What came of an attack. ``code``: None where the guard ended it."""

    code: int | None
    seconds: float
    output: str

    def wrong(self, attack: Attack) -> str:
        """What is wrong with it, or "" if nothing is."""
        if self.code is None:
            return "did not end"
        if self.code not in attack.wanted:
            return f"ended with {self.code}"
        if attack.says not in self.output:
            return f"does not say {attack.says!r}"
        return "has an internal error" if "internal error" in self.output.lower() else ""


def environment(attack: Attack) -> dict[str, str]:
    """The environment of its commands: they see the checker that this process sees, and the files of the attacks."""
    found = importlib.util.find_spec("fsdpcheck")
    assert found is not None
    assert found.origin is not None
    paths = (str(HERE), str(Path(found.origin).parent.parent))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict(attack.environment),
    }


def take(attack: Attack, folder: Path, guard: float = GUARD) -> Outcome:
    """Run the commands of one attack in a folder, and say what the last one did."""
    attack.prepare(folder)
    started = time.monotonic()
    code: int | None = None
    output = folder / "output.txt"
    for number, command in enumerate(attack.commands):
        last = number == len(attack.commands) - 1
        if last:
            attack.between(folder)
        words = [word.format(here=HERE, tmp=folder) for word in command]
        module = ["-m", "pytest", *words[1:]] if words[0] == "pytest" else ["-m", "fsdpcheck", *words]
        code = ended(attack, [sys.executable, *module], folder, output, guard)
    return Outcome(code, time.monotonic() - started, output.read_text(errors="replace")[-200_000:])


def ended(attack: Attack, command: list[str], folder: Path, output: Path, guard: float) -> int | None:
    """The exit code of a command that writes to a file; None where it had to be ended. Its stdin may stay silent."""
    reading, writing = os.pipe()
    try:
        with output.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(attack),
                stdin=reading if attack.stdin else subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(guard)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    finally:
        os.close(reading)
        os.close(writing)


def main(names: list[str]) -> int:
    """Print a line for each attack; 1 if any came out otherwise than expected."""
    failed = 0
    kept = Path(os.environ["ATTACK_OUTPUT"]) if "ATTACK_OUTPUT" in os.environ else None
    for attack in ATTACKS:
        if names and attack.name not in names:
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            outcome = take(attack, Path(folder))
        wrong = outcome.wrong(attack)
        failed += bool(wrong)
        expected = "/".join(map(str, sorted(attack.wanted)))
        print(f"{attack.name}\t{attack.way}\t{expected}\t{outcome.code}\t{outcome.seconds:.1f}\t{wrong}", flush=True)
        if kept is not None:
            (kept / f"{attack.name}.txt").write_text(outcome.output)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
