"""Section A: putting per-sample norms together over ranks, and what a wrong way does. See section_a_cost.py as well."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.training import assert_norms_in_dataset_order
from fsdpcheck.findings.violation import Violation
from fsdpcheck.program import probes
from fsdpcheck.studies.claims import toys
from fsdpcheck.studies.claims.lab import Lab, impl
from fsdpcheck.studies.claims.registry import Outcome, claim, only_if, verdict

UNCLIPPED, CLIP_NORM = 2.0**60, 2.0
WORLDS = (2, 3, 4)


@claim(
    "A1", "On a replicated batch the squared norms of the ranks' shards, summed and rooted, are the single device's."
)
def partial_contributions_are_summed(lab: Lab) -> Outcome:
    """Right contributions through the reference's step; complete ones passed off as partial through its aggregation."""
    true_B = toys.squared_norms(toys.network(), *toys.data())
    wrong, inflation = 0, []
    for world_size in WORLDS:
        for norms_B in lab.ranks(lambda rank: _partial_norms(), world_size):
            wrong += int((norms_B != true_B.sqrt()).sum())
        summed_B = lab.ranks(lambda rank: _summed(true_B), world_size)[0]
        inflation.append((summed_B / true_B)[true_B > 0])
    factors = ", ".join(f"{ratio.min():g} to {ratio.max():g}" for ratio in inflation)
    inflated = any(not torch.equal(ratio, torch.ones_like(ratio)) for ratio in inflation)
    return Outcome(
        only_if("each rank contributes the norm of its own shard", under_it=wrong == 0, otherwise=not inflated),
        f"W = {_listed(WORLDS)}: {wrong} of {sum(WORLDS) * len(true_B)} norms differ in a bit when each rank gives its"
        f" part; when each gives the complete norm, squared norms come out {factors} times too large",
    )


def _partial_norms() -> Tensor:
    model = toys.flat(toys.network())
    trainer = toys.trainer(model, replicated=True, privacy=toys.privacy(UNCLIPPED, contribution="partial"))
    trainer.step(toys.micro_batches([range(toys.SAMPLES)]))
    return torch.cat(trainer.found.norms)


def _summed(squared_B: Tensor) -> Tensor:
    aggregate = impl("clipping.norm_aggregation")
    terms = aggregate.Terms(torch.zeros_like(squared_B), squared_B)
    found: Tensor = aggregate.squared_norms(terms, "replicated", impl("sharding.collectives").axis())
    return found


@claim("A2", "Summing squared norms by position over a distributed batch inflates the mean norm by about sqrt(W).")
def summed_by_position(lab: Lab) -> Outcome:
    """Norms of a batch, and equal ones: the mean of sums by position against the mean of the samples' own norms."""
    true_B = toys.squared_norms(toys.network(), *toys.data())
    real, equal = {}, {}
    for world_size in (2, 3, 4, 6):
        real[world_size] = _inflation(lab, true_B, world_size)
        nines = torch.full((world_size,), 9.0).double()
        equal[world_size] = all(sum_1 == 9.0 * world_size for sum_1 in _mixed(lab, nines, world_size))
    at_least = all(ratio >= w**0.5 for w, ratio in real.items())
    just = all(equal.values())
    unequal = any(ratio > w**0.5 for w, ratio in real.items())
    shown = ", ".join(f"W={w}: {ratio:.4f} (sqrt(W) = {w**0.5:.4f})" for w, ratio in real.items())
    return Outcome(
        only_if(
            "the norms that are mixed are equal; else it is more", under_it=at_least and just, otherwise=not unequal
        ),
        f"inflation of the mean over {len(true_B)} samples, {shown}; equal norms: sqrt(W) at every W: {just}; the"
        f" reported 76.31 / 53.81 is {76.31 / 53.81:.4f}, above sqrt(2) as it must be: {76.31 / 53.81 >= 2**0.5}",
    )


def _inflation(lab: Lab, squared_B: Tensor, world_size: int) -> float:
    mixed = _mixed(lab, squared_B, world_size)
    return (torch.cat(mixed).sqrt().mean() / squared_B.sqrt().mean()).item()


def _mixed(lab: Lab, squared_B: Tensor, world_size: int) -> list[Tensor]:
    """What each rank holds after a sum by position: [B / W] each."""
    return lab.ranks(lambda rank: _summed(squared_B[rank::world_size].clone()), world_size)


_MODEL = ModelSpec((LayerSpec(3, bias=True, activation="relu"), LayerSpec(2)), features=3, units=(1,))


@claim("A3", "All-gathered and sorted by the sampler's global indices, norms are the single device's in dataset order.")
def gathered_in_dataset_order(lab: Lab) -> Outcome:
    """Every way of dealing out samples; the order against the oracle, and the sizes of the messages."""
    layouts = {
        "contiguous": BatchLayout("contiguous", 7),
        "strided": BatchLayout("strided", 7),
        "shuffled": BatchLayout("sampler", 8, shuffle=True),
        "wrap-around": BatchLayout("sampler", 7),
        "drop_last": BatchLayout("sampler", 7, shuffle=True, drop_last=True),
        "ragged with an empty rank": BatchLayout("ragged", 7, counts=(4, 0, 2, 1)),
    }
    wrong, sizes, run = [], set(), lab.run("reference")
    for name, layout in layouts.items():
        case = TrainingCase(_MODEL, MeshSpec(dp_shard=4), layout, StepSpec(clipping="unclipped", normaliser=4))
        execution = run(case, probes=(probes.ordered_norms,))
        try:
            assert_norms_in_dataset_order(execution, run.answer(case))
        except Violation:
            wrong.append(name)
        calls = [call for rank in execution.ranks for call in rank.trace if "(per-sample norms)" in call.subject]
        sizes |= {call.inputs[0][1] for call in calls}
    public = len(sizes) == 1
    return Outcome(
        verdict(not wrong and public),
        f"W = 4, {len(layouts)} layouts ({', '.join(layouts)}): {len(wrong)} in a wrong order or with wrong norms"
        f"{': ' + ', '.join(wrong) if wrong else ''}; every rank sends {_shape(sizes)} norms, whatever its share",
    )


def _shape(sizes: set[tuple[int, ...]]) -> str:
    return " or ".join(str(size[0]) for size in sorted(sizes))


@claim("A4", "Whether a batch is replicated or distributed can be detected automatically.")
def layout_is_detected(lab: Lab) -> Outcome:
    """Fingerprints over batches of different rows, both ways; then a batch of equal rows, dealt out and replicated."""
    x, _ = toys.data()
    x = x + 8 * torch.arange(len(x)).unsqueeze(1)  # all rows different
    right, ran = 0, 0
    for world_size in WORLDS:
        shares = [x[rank::world_size] for rank in range(world_size)]
        distributed, replicated = _detections(lab, shares), _detections(lab, [x] * world_size)
        right += distributed.count("distributed") + replicated.count("replicated")
        ran += 2 * world_size
    equal = torch.ones(2, 1, 3).double()
    as_shares, as_copies = _detections(lab, list(equal.unbind())), _detections(lab, [equal[0]] * 2)
    undecided = as_shares == as_copies
    return Outcome(
        only_if(
            "ranks differ, or hold several rows that all differ; equal samples are undecidable and refused",
            under_it=right == ran,
            otherwise=not undecided,
        ),
        f"{right} of {ran} ranks right on batches of {len(x)} different rows, W = {_listed(WORLDS)}; two equal rows"
        " dealt"
        f" out give {as_shares[0]!r}, one row on both ranks {as_copies[0]!r}: the same bytes on every rank",
    )


def _detections(lab: Lab, rows: list[Tensor]) -> list[str]:
    """What each rank makes of the batch whose local rows are ``rows[rank]``."""
    return lab.ranks(lambda rank: _detected(rows[rank]), len(rows))


def _detected(rows: Tensor) -> str:
    layout = impl("clipping.batch_layout")
    try:
        found: str = layout.detect(rows, impl("sharding.collectives").axis())
    except layout.AmbiguousLayout:
        return "ambiguous"
    return found


@claim("A5", "An inflated norm is a monitoring value only: training is unaffected, because clipping is local.")
def inflated_norms_change_training(lab: Lab) -> Outcome:
    """One clipped step with the norms as they are, summed for a report, and summed where clip factors are formed."""
    clip_norm = CLIP_NORM
    right = lab.ranks(lambda rank: _clipped_step(rank, clip_norm, report=False), 2)[0]
    reported = lab.ranks(lambda rank: _clipped_step(rank, clip_norm, report=True), 2)[0]
    with impl("faults").install("norms_summed_by_position"):
        fed = lab.ranks(lambda rank: _clipped_step(rank, clip_norm, report=False), 2)[0]
    initial = {name: p.detach() for name, p in toys.network().named_parameters()}
    moved, short = (_moved(initial, values) for _, values in (right, fed))
    ratio = fed[0] / right[0]
    elements = toys.different(right[1], fed[1])
    return Outcome(
        only_if(
            "no clip factor is formed from it",
            under_it=toys.different(right[1], reported[1]) == 0,
            otherwise=elements == 0,
        ),
        f"W = 2, C = {clip_norm:g}: fed to the clip factors they shrink to {ratio.min():.3f} .. {ratio.max():.3f} of"
        f" their value, the update to {short / moved:.3f} of its norm, and {elements} parameter elements differ;"
        " summed for"
        f" a report only, {toys.different(right[1], reported[1])} differ",
    )


def _clipped_step(rank: int, clip_norm: float, *, report: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """(clip factors of this rank's samples, parameters after the step)."""
    trainer = toys.trainer(toys.flat(toys.network()), privacy=toys.privacy(clip_norm))
    trainer.step(toys.micro_batches([toys.share(rank, 2)]))
    if report:
        impl("clipping.norm_aggregation").sum_over(
            torch.cat(trainer.found.norms).square(), impl("sharding.collectives").axis()
        )
    return torch.cat(trainer.found.factors), trainer.model.full_values()


def _moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    return torch.stack([(after[name] - before[name]).square().sum() for name in before]).sum().sqrt().item()


_ROWS = {
    0: ([[1, 2, 3, 4, 5, 6], [0.5, 1, 1.5, 2, 2.5, 3]], [91.0, 20.25]),
    1: ([[2, 1, 4, 2, 3, 1], [1, 0.5, 2, 1, 1.5, 0.5]], [39.0, 9.75]),
}
_TOTALS = [130.0, 30.0]


@claim(
    "A7",
    "Worked example: rows of rank 0 have squared norms [91.0, 20.25], of rank 1 [39.0, 9.75], in all [130, 30], one"
    " number a sample.",
)
def worked_example(lab: Lab) -> Outcome:
    """The squares, added by the ranks themselves; and how many norms a batch of three samples has."""

    def body(rank: int) -> tuple[list[float], list[float]]:
        own = torch.tensor(_ROWS[rank][0]).double().square().sum(1)
        return own.tolist(), _summed(own).tolist()

    found = lab.ranks(body, 2)
    parts, totals = [part for part, _ in found], found[0][1]
    numbers = sum(int(got == said) for rank in _ROWS for got, said in zip(parts[rank], _ROWS[rank][1], strict=True))
    numbers += sum(int(got == said) for got, said in zip(totals, _TOTALS, strict=True))
    weight, x = torch.tensor(_ROWS[0][0] + _ROWS[1][0]).double(), torch.ones(3, 6).double()
    norms = len(((x @ weight.T).unsqueeze(2) * x.unsqueeze(1)).square().sum((1, 2)))
    said = len(totals) + sum(len(stated) for _, stated in _ROWS.values())
    return Outcome(
        verdict(numbers == said and norms == len(parts[0])),
        f"{numbers} of the {said} numbers are right: rank 0 has {parts[0]}, rank 1 {parts[1]}, together {totals}; and"
        " rows of"
        f" a weight's shard are not samples: 3 samples have {norms} norms, a shard of {len(parts[0])} rows would give"
        f" {len(parts[0])}",
    )


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)
