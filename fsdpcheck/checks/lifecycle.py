"""Checks of what sharding units hold at the moments that an implementation announces (see probes.units).

All raise AdapterError where a moment of which they say something was not announced, in any step on any rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdpcheck.adapters.contract import Moment, UnitState
from fsdpcheck.checks._moments import OF_UNITS, require_announced
from fsdpcheck.checks._read import completed
from fsdpcheck.errors import AdapterError, UsageError, explain
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.program import probes

_AFTER_BACKWARD = ("after_init", "after_reshard", "before_step", "after_step")
"""Moments at which nothing may be kept for a backward."""
_OVER = {"after_init": "construction", "after_forward": "forward"}
"""What was over when units that stay gathered were first seen; at all other moments a backward."""


def assert_few_gathered(execution: Execution) -> None:
    """At most one unit beside the root holds gathered parameters, unless they are to be kept for a backward to come."""
    kept = not execution.request.training.mesh.reshard_after_forward
    for moment, where, (_, *inner) in _seen(execution, OF_UNITS):
        gathered = [unit.name for unit in inner if unit.gathered]
        if len(gathered) > 1 and not (kept and moment not in _AFTER_BACKWARD):
            raise Violation("inner units stay gathered", got=f"{', '.join(gathered)} hold gathered parameters",
                            wanted="one inner unit at most", where=where,
                            cause=f"a unit is not freed when its {_OVER.get(moment, 'backward')} is over")  # fmt: skip


def assert_released(execution: Execution) -> None:
    """After each step, and before the first, no unit holds gathered parameters or whole local gradients."""
    for moment, where, units in _seen(execution, ()):
        if moment not in ("after_init", "after_step"):
            continue
        if gathered := [unit.name for unit in units if unit.gathered]:
            raise Violation("units are gathered between steps", got=", ".join(gathered), wanted="none", where=where,
                            cause="a unit is not freed when its backward is over")  # fmt: skip
        if unreduced := [name for unit in units for name in unit.unreduced]:
            raise Violation("local gradients outlive their step", got=f"of {', '.join(unreduced)}", wanted="none",
                            where=where, cause="a gradient is not released when it is reduced")  # fmt: skip


def assert_aliased(execution: Execution) -> None:
    """Every unit's shard is its unsharded parameters' memory, at every moment. Asked of one rank."""
    if execution.request.training.world_size > 1:
        raise UsageError("shards of several ranks are no whole; next: ask of a case with W = 1")
    for _, where, units in _seen(execution, OF_UNITS):
        if apart := [unit.name for unit in units if not unit.aliased]:
            raise Violation("parameters are held twice on one rank", got=f"two memories in {', '.join(apart)}",
                            wanted="the shard is the whole", where=where,
                            cause="the shard is a copy of the unsharded parameters")  # fmt: skip


def _seen(execution: Execution, moments: Sequence[Moment]) -> Iterator[tuple[str, str, list[UnitState]]]:
    """(moment, where in words, units, the root first) of all ranks. Raises UsageError if nothing was observed.

    And AdapterError where ``moments`` were not announced, or other units are shown than the model was given: one that
    is left out could hold anything.
    """
    wanted = execution.request.training.model.unit_count + 1
    for result in completed(execution):
        if not probes.units.saw(result):
            raise UsageError("the run observed no units; next: run it with probes.units")
    require_announced(execution, probes.units, moments)
    for result in execution.ranks:
        for moment, step, units in probes.units.saw(result):
            where = f"{moment}, step {step}, rank {result.rank}"
            if len(units) != wanted:
                what = f"units() of adapter {execution.request.adapter!r} does not show every unit"
                said = f"{wanted}: the root, then the {wanted - 1} of Setup.units"
                then = "list one UnitState for each"
                raise AdapterError(explain(what, got=f"{len(units)} units", wanted=said, where=where, then=then))
            yield moment, where, units
