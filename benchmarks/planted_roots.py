"""Several mistakes in one implementation: how many roots one session reports, and which of the mistakes they are.

``python -m benchmarks roots [PROFILE]``. Faults are planted together. Five break laws of clipping and training
that share their cases, so that one hides another there; the other three have laws to themselves. A mistake is reported
if a finding's cause is the one that its fault asks for, and a root that no fault asks for is extra.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from fsdpcheck.findings import roots
from fsdpcheck.findings.verdict import Finding
from fsdpcheck.impl import faults
from fsdpcheck.report import document_reader

FIVE: Final = (
    *("convolution_patches_shifted", "embedding_rows_not_merged", "tied_cross_terms_left_out"),
    *("replicas_summed_not_averaged", "global_norm_of_own_shard"),
)
EIGHT: Final = (*FIVE, "moments_not_taken_over", "every_rank_shuffles_by_itself", "hooks_left_on_the_loss")
PRINTED: Final = "planted roots"


def lines(profile: str = "quick") -> Iterator[str]:
    """A session for five and one for eight mistakes: what each of them reports. Exits with 1 if one is not reported."""
    lacks = False
    for planted in (FIVE, EIGHT):
        told = Told(planted, session(planted, profile))
        lacks |= bool(told.missed)
        yield from told.lines()
    if lacks:
        raise SystemExit(1)


class Told:
    """What the findings of one session say of the mistakes that were planted. ``extra``: findings, one a root."""

    def __init__(self, planted: Sequence[str], findings: Sequence[Finding]) -> None:
        self.groups = roots.grouped(findings)
        self.of = {name: [group for group in self.groups if _is_of(name, group)] for name in planted}
        self.missed = [name for name, groups in self.of.items() if not groups]
        known = [group for groups in self.of.values() for group in groups]
        self.extra = [group[0] for group in self.groups if group not in known]

    def lines(self) -> Iterator[str]:
        """For a reader."""
        found = len(self.of) - len(self.missed)
        yield f"{PRINTED}: {found} of {len(self.of)} in one session, {len(self.groups)} roots reported"
        for name, groups in self.of.items():
            laws = ", ".join(sorted({finding.law for group in groups for finding in group}))
            yield f"  {name}: {f'{len(groups)} root(s), by {laws}' if groups else 'not reported'}"
        yield from (f"  extra, by {one.law}: {one.cause or one.what}" for one in self.extra)


def _is_of(name: str, group: Sequence[Finding]) -> bool:
    return any(re.search(faults.ALL[name].cause, finding.cause) for finding in group)


def session(planted: Sequence[str], profile: str, *laws: str) -> list[Finding]:
    """All findings of ``fsdpcheck run`` on the reference with these faults, of all laws or of these.

    Raises RuntimeError for an error.
    """
    installs = [word for name in planted for word in ("--install", f"fsdpcheck.impl.faults:{name}")]
    with tempfile.TemporaryDirectory(prefix="fsdpcheck-roots-") as scratch:
        file = Path(scratch) / "report.json"
        chosen = [word for law in laws for word in ("--law", law)]
        asked = ("--adapter", "reference", *installs, *chosen, "--profile", profile, "--no-confirm")
        command = (sys.executable, "-m", "fsdpcheck", "run", *asked, "--json", str(file))
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():
            raise RuntimeError(f"exit code {ran.returncode}: {ran.stderr[-2000:]}")
        verdicts = document_reader.read(file).verdicts.values()
    return [finding for verdict in verdicts for finding in verdict.findings]
