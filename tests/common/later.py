"""Answers of the single device that are computed when a test first looks at them: to collect tests computes none."""

from __future__ import annotations

from typing import Any, Final

from fsdpcheck import oracle
from fsdpcheck.adapters.contract import FactorRule
from fsdpcheck.case import TrainingCase
from fsdpcheck.oracle import Answer

_FIELDS: Final = "__dataclass_fields__"
_LOOKS: Final = {_FIELDS, *getattr(Answer, _FIELDS), *(name for name in vars(Answer) if name[0] != "_")} - {"case"}
"""What an answer has; pytest asks every object of a module for other things, and ``replace`` for its fields first."""


def later(case: TrainingCase, rule: FactorRule | None = None) -> Answer:
    """``oracle.answer(case, rule)``, but not yet; its ``case`` is known before."""
    answer = object.__new__(_Later)
    vars(answer).update(case=case, asked=(case, rule))
    return answer


class _Later(Answer):
    """Becomes the Answer at the first look at anything of it but its case."""

    def __getattribute__(self, name: str) -> Any:
        if name in _LOOKS:
            own = object.__getattribute__(self, "__dict__")
            answer = vars(oracle.answer(*own.pop("asked")))
            own.update(answer)
            object.__setattr__(self, "__class__", Answer)
        return object.__getattribute__(self, name)
