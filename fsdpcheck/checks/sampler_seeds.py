"""Check that the seed reaches a sampler: with another one shuffled epochs and Poisson draws are others.

Legend: D records, P shares, E epochs, S steps of one, q the probability of a draw.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fsdpcheck.case import SamplerCase
from fsdpcheck.case.sampler import share_count
from fsdpcheck.checks.samplers import Share, case_of, shares_of
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import Cause, Causes
from fsdpcheck.findings.violation import Violation

FALSE_ALARM = 1e-9
"""Most probability that a case of a right sampler is called wrong."""


def assert_seed_matters(execution: Execution, other: Execution) -> None:
    """In every epoch another seed gives another order; of Poisson draws, other ones on every share that draws any.

    Raises UsageError where the cases differ in more than the seed, or where two seeds may give the same by chance with
    a higher probability than FALSE_ALARM (``chance``).
    """
    case = case_of(execution)
    seed = case_of(other).seed
    if seed == case.seed or case_of(other) != replace(case, seed=seed):
        raise UsageError("the two runs differ in something else than the seed; next: change the seed alone")
    if (probability := chance(case)) > FALSE_ALARM:
        raise UsageError(
            f"two seeds give the same with probability {probability:.1e}; wanted {FALSE_ALARM} at most; next: shuffle,"
            " and draw more records or steps"
        )
    what = "draws" if case.sampling.kind == "poisson" else "order"
    same = [_same(case, shares_of(execution), shares_of(other), epoch) for epoch in range(case.sampling.epochs)]
    for epoch, alike in enumerate(same):
        if alike:
            raise Violation(
                f"another seed gives the same {what}",
                got=f"the {what} of seed {case.seed}{alike}",
                wanted=f"another: the same by chance with probability {probability:.1e} at most",
                where=f"epoch {epoch}, seed {seed}",
                cause=lambda: _causes(what, same),
            )


def chance(case: SamplerCase) -> float:
    """The most probability that a right sampler gives the same in some epoch with two seeds.

    Shuffled: E (D - k)! / D!, where k records of an order are dealt out. Poisson: E P (q^2 + (1 - q)^2)^S, for a share
    that draws any has one record at least, whose S draws all agree.
    """
    spec, count = case.sampling, share_count(case.sampling, case.mesh)
    if spec.kind == "poisson":
        return spec.epochs * count * float(spec.rate**2 + (1 - spec.rate) ** 2) ** (spec.steps - spec.start)
    if not spec.shuffle or spec.start:
        return 1.0
    dealt = spec.records - spec.records % count if spec.drop_last else spec.records
    return spec.epochs / math.perm(spec.records, dealt)


def _same(case: SamplerCase, first: list[Share], second: list[Share], epoch: int) -> str:
    """What two seeds have the same in an epoch, as what is said behind it; "" for nothing."""
    one, two = ([[step.records for step in share[epoch]] for share in shares] for shares in (first, second))
    if case.sampling.kind == "shares":
        return ", entry by entry" if one == two else ""
    alike = [share for share, (own, its) in enumerate(zip(one, two, strict=True)) if own == its and any(own)]
    return f" in all steps, on shares {alike} of {len(one)}" if alike else ""


def _causes(what: str, same: list[str]) -> Causes:
    reached = "draws" if what == "draws" else "shuffle"
    return [Cause("seed", f"the seed does not reach the {reached}")] if len({*same}) == 1 else []
