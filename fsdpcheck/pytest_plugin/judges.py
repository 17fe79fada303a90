"""Judges of a pytest session: for each plan that tests ask for a process, one at a time."""

from __future__ import annotations

from fnmatch import fnmatchcase

from fsdpcheck.errors import UsageError, explain
from fsdpcheck.pytest_plugin.own_tests import Asked, BoundLaw
from fsdpcheck.session.judge import Judge
from fsdpcheck.session.plan import Plan


class Judges:
    """``of(plan)`` is the judge of a plan; that of another plan rests meanwhile, for each takes half a gigabyte."""

    def __init__(self) -> None:
        self._judges: dict[Plan, Judge] = {}

    def of(self, plan: Plan) -> Judge:
        """The judge of ``plan``. Raises UsageError for a plan that cannot begin."""
        for other, judge in self._judges.items():
            if other != plan:
                judge.rest()
        found = self._judges.setdefault(plan, Judge(plan))
        found.begin()
        return found

    def close(self) -> None:
        """End all processes."""
        for judge in self._judges.values():
            judge.rest()

    def laws(self, asked: Asked, defaults: Plan) -> list[BoundLaw]:
        """The laws that become tests: those that are promised, and those that are required.

        Raises UsageError for a plan that cannot begin, and where there is no such law.
        """
        plan = asked.plan(defaults)
        judge = self.of(plan)
        found = []
        for ref in plan.adapters:
            for law in judge.ledger.laws:
                reason, required = judge.unpromised[ref].get(law, ""), any(fnmatchcase(law, g) for g in asked.require)
                if required or not reason:
                    found.append(BoundLaw(law, ref, reason, judge.spaces[law], required, plan, self.of))
        laws = ", ".join(plan.laws)
        for ref in plan.adapters:
            if not any(one.adapter == ref for one in found):
                then = "choose other laws, or add the promise to the adapter's Features"
                raise UsageError(
                    explain(f"{ref} promises none of the laws {laws!r}: nothing would be checked", then=then)
                )
        for glob in asked.require:
            if not any(fnmatchcase(law, glob) for law in judge.ledger.laws):
                raise UsageError(explain(f"required is {glob!r}, and no chosen law matches", got=f"laws {laws!r}"))
        return found
