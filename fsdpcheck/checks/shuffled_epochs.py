"""Check of what shuffled epochs promise of chance: over many of them every record comes to every share.

Legend: D records, P shares, E epochs.
"""

from __future__ import annotations

from functools import partial

from fsdpcheck.case.sampler import mixing_epochs, repeated, share_count
from fsdpcheck.checks.samplers import case_of, shares_of
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import PATTERN, Cause, Causes
from fsdpcheck.findings.violation import Violation

FALSE_ALARM = 1e-9
"""Most probability that a case of orders which are all equally likely, each by itself, is called wrong."""
_SHOWN = 3


def assert_come_everywhere(execution: Execution) -> None:
    """Every record is on every share in some epoch, so that none is left out of all of them or stays where it is.

    A share holds floor(D/P) distinct records of an epoch or more, each with equal probability, so one record misses one
    share in all E epochs with probability (1 - floor(D/P)/D)^E at most, and some record some share with D P times that.
    Raises UsageError where the case does not shuffle, or has too few epochs to keep that below FALSE_ALARM.
    """
    case = case_of(execution)
    spec = case.sampling
    enough = mixing_epochs(spec.records, share_count(spec, case.mesh), FALSE_ALARM)
    if not (spec.shuffle and enough <= spec.epochs):
        got = f"{spec.epochs} epochs, {'shuffled' if spec.shuffle else 'in the order of the data set'}"
        raise UsageError(f"got {got}; wanted {enough} shuffled ones or more; next: draw the case with many_epochs")
    came = [{record for epoch in own for step in epoch for record in step.records} for own in shares_of(execution)]
    for record in range(spec.records):
        missed = [share for share, own in enumerate(came) if record not in own]
        if missed:
            raise Violation(
                "shuffled epochs never bring a record to some share",
                got=f"never on shares {missed} of {len(came)}",
                wanted=f"on every share in some epoch: otherwise with probability {FALSE_ALARM:.0e} at most",
                where=f"record {record}, {spec.epochs} epochs",
                cause=partial(_causes, came, spec.records, repeated(spec, case.mesh)),
            )


def _causes(came: list[set[int]], records: int, extra: int) -> Causes | None:
    """What keeps records from shares; ``came``: by share, all its records; ``extra``: entries that repeat a record.

    None where entries that repeat a record go from share to share, so that sets say nothing of the others.
    """
    never = [record for record in range(records) if not any(record in own for own in came)]
    if never:
        text = f"records {', '.join(map(str, never[:_SHOWN]))} are left out of every epoch: they are chosen before the"
        return [Cause("left out", f"{text} shuffle", PATTERN)]
    if extra:
        return None
    apart = sum(map(len, came)) == len(set().union(*came))
    return [Cause("kept", "no record ever changes its share: epochs are shuffled within shares")] if apart else []
