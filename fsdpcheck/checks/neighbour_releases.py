"""Checks of a training whose optimizer is given the releases of a neighbour's: what is then still different is told.

Composition asks for it: given what was released before, each step moves by what it may, and all that is decided after a
release is a function of releases. Legend: k how many clip norms the neighbours may be apart.
"""

from __future__ import annotations

from functools import partial

from fsdpcheck.checks._compare import first_apart, require_equal
from fsdpcheck.checks._read import completed
from fsdpcheck.checks.invariance import Side
from fsdpcheck.checks.privacy import assert_others_keep_their_coefficient, assert_sensitivity, kept
from fsdpcheck.errors import NotApplicable
from fsdpcheck.execution import Execution, RankResult
from fsdpcheck.execution.releases import Release
from fsdpcheck.findings.cause import PATTERN, Cause, Causes
from fsdpcheck.findings.violation import Violation
from fsdpcheck.strategies.neighbours import Neighbours


def releases_of(execution: Execution) -> tuple[tuple[Release, ...], ...]:
    """What each rank's optimizers were given in a run. Raises NotApplicable where no optimizer was called."""
    found = tuple(tuple(own.releases) for own in completed(execution))
    if not any(found):
        raise NotApplicable("no optimizer that Setup.optimizer made is called, so none can be given other gradients")
    return found


def assert_replayed(pair: Neighbours, first: Side, second: Side, coefficients: bool) -> None:
    """At every step the second training, which is given the releases of the first, differs from it by k * C at most.

    And in nothing else: the optimizer is called as often, with the same options, and leaves the same parameters. With
    ``coefficients``, those of records that did not move are compared too. ``second`` has the answer of the case with
    the first one's gradients. Raises NotApplicable where an optimizer does not go by the gradients that it is given.
    """
    one, other = completed(first[0]), completed(second[0])
    if any(not release.kept for own in other for release in own.releases):
        raise NotApplicable("gradients are set anew within the optimizer's call, so no others can be given to it")
    for step in range(pair.first.step.steps):
        if coefficients and kept(pair, step):
            assert_others_keep_their_coefficient(pair, first, second, step)
        assert_sensitivity(pair, first, second, step)
        for mine, theirs in zip(one, other, strict=True):
            _require_same_decisions(pair, step, mine, theirs)


def _require_same_decisions(pair: Neighbours, step: int, one: RankResult, other: RankResult) -> None:
    """One rank's optimizers were called alike at ``step``, and left the same parameters."""
    where = f"step {step}, rank {one.rank}, {pair.words}; both trainings were given the same releases"
    a, b = ([release.options for release in own.releases if release.step == step] for own in (one, other))
    if len(a) != len(b):
        raise Violation(
            "whether the optimizer is called depends on one record",
            got=f"{len(b)} calls",
            wanted=f"{len(a)} calls",
            where=where,
            cause=partial(_of_calls, step),
        )
    if (call := first_apart(a, b)) is not None:
        name = next(name for name in a[call] if a[call][name] != b[call].get(name))
        raise Violation(
            "an option of the optimizer depends on one record",
            got=f"{name} = {b[call].get(name)!r}",
            wanted=f"{a[call][name]!r}",
            where=where,
            cause=partial(_of_option, name.partition(" ")[0]),
        )
    mine, theirs = one.steps[step].params, other.steps[step].params
    require_equal("parameters depend on one record beyond what was released", theirs, mine, where, _of_parameters)


def _of_calls(step: int) -> Causes:
    text = f"whether step {step} is taken is decided from the records of the batch, and not from what was released"
    return [Cause("step decided from records", text, PATTERN)]


def _of_option(name: str) -> Causes:
    named = {"lr": "the learning rate"}.get(name, name)
    return [
        Cause("option from records", f"{named} follows from the records of the batch: who joins changes it", PATTERN)
    ]


def _of_parameters() -> Causes:
    text = "parameters are changed beside the optimizer's own step, by what depends on the records of the batch"
    return [Cause("changed beside the optimizer", text, PATTERN)]
