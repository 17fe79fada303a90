"""Causes of wrong per-sample norms [n]: ratios, parameters left out, ranks mixed, shards taken for the whole."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from fsdpcheck.diagnosis import bits, joint_clipping, norm_rules, shards, tied_uses
from fsdpcheck.diagnosis.cause_fit import by_ratio, chunks, mentions, rows
from fsdpcheck.findings.cause import PATTERN, Cause
from fsdpcheck.oracle import INSTRUMENT, Answer, StepAnswer

MIXED = Cause("by position", "squared norms were summed over the ranks by position, mixing samples")


def candidates(answer: Answer, step: int, rank: int | None) -> Iterator[tuple[Cause, Tensor]]:
    """(cause, norms [n] in the case's dtype); ``rank`` None leaves out what differs between ranks."""
    case, wanted = answer.case, answer.steps[step]
    for cause, ratio in by_ratio(case, step, "norm ratio", "norms are exactly {} times the right ones"):
        yield cause, wanted.norms * ratio
    yield Cause("squared norms", "squared norms stand in for norms"), wanted.squared_norms.to(wanted.norms.dtype)
    for cause, squared in _squared(answer, step, rank):
        yield cause, squared.clamp(min=0).to(wanted.norms.dtype).sqrt()


def by_position(answer: Answer, step: int, rank: int | None = None) -> Iterator[Tensor]:
    """Norms [n] if squared norms of samples at equal positions of the ranks were added up: in all or in one replica's
    ranks, counting positions in a step or in a micro-batch. Those that ``rank`` sees; None: all, and nothing where a
    sample occurs twice, since its ranks see different ones."""
    case, wanted = answer.case, answer.steps[step]
    if case.shares == 1:
        return
    if rank is None and max(wanted.multiplicity, default=0) > 1:
        return
    apart = slice(None, None, case.copies)
    batches = [chunks(case, step, wanted)[apart], [[own] for own in rows(case, step, wanted)[apart]]]
    for size in sorted({case.shares, case.mesh.dp_shard // case.copies} - {0, 1}):
        for everyone in batches if case.step.micro_batches > 1 else batches[1:]:
            squared = wanted.squared_norms.clone()
            travelling = _travelling(answer, step)
            for member in range(case.shares) if rank is None else (rank // case.copies,):
                first = member // size * size
                for row, others in _positions(everyone[first : first + size], member - first):
                    squared[row] = wanted.squared_norms[row] - travelling[row] + travelling[others].sum()
            yield squared.to(wanted.norms.dtype).sqrt()


def _travelling(answer: Answer, step: int) -> Tensor:
    """[n]: what of the squared norms is summed over ranks, if anything is: all; of mixed contributions the units'."""
    wanted = answer.steps[step]
    if answer.case.step.contribution != "mixed":
        return wanted.squared_norms
    by_unit = shards.units(answer.case, list(wanted.gradients))
    inner = [wanted.gradients[name] for unit, names in by_unit.items() if unit != shards.ROOT for name in names]
    return sum((value.flatten(1).square().sum(1) for value in inner), torch.zeros_like(wanted.squared_norms))


def _positions(group: list[list[list[int]]], member: int) -> Iterator[tuple[int, list[int]]]:
    """(row of a member of the group, rows of all at its position), by rank and micro-batch."""
    for number, own in enumerate(group[member]):
        for position, row in enumerate(own):
            yield row, [other[number][position] for other in group if position < len(other[number])]


def _squared(answer: Answer, step: int, rank: int | None) -> Iterator[tuple[Cause, Tensor]]:
    """(cause, squared norms [n], float64)."""
    wanted = answer.steps[step]
    squares = {name: value.flatten(1).square().sum(1) for name, value in wanted.gradients.items()}
    yield from _left_out(wanted, squares)
    yield from _cast(wanted, squares)
    for cause, delta in norm_rules.candidates(answer, step):
        yield cause, wanted.squared_norms + delta
    yield from tied_uses.beside(answer, step)
    if rank is not None:
        yield from joint_clipping.pairs(answer, step, rank)
        yield from joint_clipping.norms(answer, step, rank)
        yield from joint_clipping.one_row(answer, step, rank)
        yield from shards.own_squares(answer, step, rank)
    if answer.case.world_size > 1:
        yield from _complete_again(answer, wanted, squares)
        for mixed in by_position(answer, step, rank) if rank is not None else ():
            yield MIXED, mixed.double().square()


def _left_out(wanted: StepAnswer, squares: dict[str, Tensor]) -> Iterator[tuple[Cause, Tensor]]:
    """One parameter, or all of a kind ("bias of linear layers"), missing from the norm."""
    kinds: dict[str, list[str]] = {}
    for name in squares:
        kinds.setdefault(_kind(name), []).append(name)
    biases = [name for name in squares if name.endswith(".bias")]
    groups = [(f"left out: {kind}", names) for kind, names in kinds.items()]
    plain = [name for name in biases if "norm" not in name]
    groups += [("left out: linear bias", plain)] if len(plain) > 1 else []
    groups += [("left out: all biases", biases)] if len(biases) > 1 else []
    groups += [(f"left out: parameter {name}", [name]) for names in kinds.values() if len(names) > 1 for name in names]
    for key, names in groups:
        verb = "is" if len(names) == 1 else "are"
        rest = wanted.squared_norms - torch.stack([squares[name] for name in names]).sum(0)
        yield Cause(key, f"{mentions(names)} {verb} left out of the norm"), rest


def _kind(name: str) -> str:
    """ "linear bias" of "units.0.linear3.bias"; the instrument is a kind of its own."""
    if name == INSTRUMENT:
        return "instrument"
    layer, _, rest = name.removeprefix("units.").removeprefix("tail.").partition(".")
    if layer.isdigit():
        layer, _, rest = rest.partition(".")
    kind = re.sub(r"[0-9]+$", "", layer)
    return f"{'linear' if kind == 'attention' else kind} {rest.rpartition('.')[2]}"


def _cast(wanted: StepAnswer, squares: dict[str, Tensor]) -> Iterator[tuple[Cause, Tensor]]:
    """Squares rounded to a narrower type, layer by layer or as a whole."""
    layers: dict[str, Tensor] = {}
    for name, square in squares.items():
        layer = name.rpartition(".")[0]
        layers[layer] = layers.get(layer, torch.zeros_like(square)) + square
    for count in (8, 11, 24) if wanted.norms.dtype == torch.float64 else (8, 11):
        by_layer = sum((bits.rounded(square, count) for square in layers.values()), torch.zeros(()))
        yield Cause(f"layers of {count} bits", f"the layers' squared norms are {bits.words(count)}"), by_layer
        whole = bits.rounded(wanted.squared_norms, count)
        yield Cause(f"squares of {count} bits", f"squared norms are {bits.words(count)}"), whole


def _complete_again(answer: Answer, wanted: StepAnswer, squares: dict[str, Tensor]) -> Iterator[tuple[Cause, Tensor]]:
    """Terms that every rank has whole, summed over the ranks: of a unit, or of one parameter wherever it is."""
    counts = (("W", answer.case.world_size), ("S", answer.case.mesh.dp_shard))
    for word, count in counts:
        times = f"counted {word} = {count} times: summed over ranks"
        for unit, names in shards.units(answer.case, list(squares)).items():
            if len(names) == len(squares):
                continue
            whole = torch.stack([squares[name] for name in names]).sum(0)
            yield (
                Cause(f"counted again: {unit}", f"terms of {unit} that are complete on every rank are {times}"),
                wanted.squared_norms + whole * (count - 1),
            )
        for name, square in squares.items():
            text = f"{name}, which is complete on every rank, is {times}"
            yield (
                Cause(f"counted again: a parameter, {word}", text, PATTERN),
                wanted.squared_norms + square * (count - 1),
            )
