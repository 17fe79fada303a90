"""Puts what ranks have shown in pieces together, where it is judged: an execution has whole tensors alone."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpcheck.errors import AdapterError, explain, qualified
from fsdpcheck.execution import Execution, Failure, RankResult, StepRecord
from fsdpcheck.execution.pieces import Shown
from fsdpcheck.execution.whole import Named, NotWhole, make_whole

_OF_STEPS = {"params": "parameters()", "grads": "gradients()", "saved": "parameters()", "loaded": "parameters()"}
"""Fields of a step's record that ranks may show in pieces -> the method that gave them."""


def assemble(execution: Execution) -> Execution:
    """The same execution, each tensor in it whole.

    Pieces that make no whole break the protocol of adapters: then there is a failure of kind "adapter". Of a run that
    failed anyway, what lacks a piece is left out.
    """
    for what, named in _shown(execution.ranks):
        try:
            make_whole(named, what)
        except NotWhole as error:
            if execution.failure is None:
                execution.failure = _failure(str(error))
            for one in named:
                _forget_pieces(one)
    return execution


def _shown(ranks: list[RankResult]) -> Iterator[tuple[str, list[Named | None]]]:
    """What all ranks have shown at one moment, and the method that gave it."""
    yield "parameters()", [result.initial for result in ranks]
    steps = max((len(result.steps) for result in ranks), default=0)
    for number in range(steps):
        records = [result.steps[number] if number < len(result.steps) else None for result in ranks]
        for name, method in _OF_STEPS.items():
            yield method, [_field(record, name) for record in records]


def _field(record: StepRecord | None, name: str) -> Named | None:
    return None if record is None else getattr(record, name)


def _forget_pieces(named: Named | None) -> None:
    for name, value in list((named or {}).items()):
        if named is not None and isinstance(value, Shown):
            del named[name]


def _failure(why: str) -> Failure:
    text = explain(
        "what ranks show of a tensor makes no whole of it",
        got=why,
        wanted="each of its places on one rank, or the same value of it on several",
        then="see fsdpcheck.adapter.Part: which ranks have the other parts",
    )
    return Failure("adapter", text, exception=qualified(AdapterError))
