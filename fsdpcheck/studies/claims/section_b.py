"""Section B: sharded training against unsharded, shapes of shards, gradients. See section_b_padding.py as well."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.training import assert_gradients_equal
from fsdpcheck.findings.violation import Violation
from fsdpcheck.studies.claims import toys
from fsdpcheck.studies.claims.lab import Lab, impl
from fsdpcheck.studies.claims.registry import Outcome, claim, only_if, verdict

STEPS = 5


@claim("B1", "At W=1 all losses and parameters of 5 iterations are those of unsharded training (difference 0.0).")
def one_rank_is_unsharded_training(lab: Lab) -> Outcome:
    """A model of 12 parameters on real numbers, with momentum, four ways; the single device in an ordinary loop."""
    wanted = _trained(_twelve())
    ways = {
        "flat": _trained_flat,
        "per parameter": _trained_rows,
        "fully_shard": _trained_fsdp2,
        "fsdp1": _trained_fsdp1,
    }
    largest = {}
    for name, way in ways.items():
        got = lab.ranks(lambda rank, way=way: way(), 1)[0]  # type: ignore[misc]
        largest[name] = max((one - two).abs().max().item() for one, two in zip(got, wanted, strict=True))
    numel = sum(parameter.numel() for parameter in _twelve().parameters())
    shown = ", ".join(f"{name} {value:g}" for name, value in largest.items())
    return Outcome(
        verdict(not any(largest.values())),
        f"{numel} parameters in float32, {STEPS} steps: largest difference in any loss or parameter: {shown}",
    )


def _twelve() -> nn.Sequential:
    generator = torch.Generator().manual_seed(7)
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module


def _real(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)


def _trained(module: nn.Module, named: Any = None) -> list[Tensor]:
    """An ordinary loop: the losses of each step, then the parameters, as ``named`` shows them."""
    x, y, found = _real(4, 2, seed=1), _real(4, 1, seed=2), []
    optimizer = _momentum(module.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = toys.loss(module(x), y)
        torch.autograd.backward(losses, torch.full_like(losses, 1 / 4))
        optimizer.step()
        found.append(losses.detach())
    shown = named() if named is not None else [parameter.detach() for parameter in module.parameters()]
    return found + [value.reshape(-1) for value in shown]


def _trained_fsdp2() -> list[Tensor]:
    module = _twelve()
    fully_shard(module[0])
    fully_shard(module)
    return _trained(module, lambda: [parameter.full_tensor().detach() for parameter in module.parameters()])  # type: ignore[attr-defined]


def _trained_fsdp1() -> list[Tensor]:
    wrapped = FullyShardedDataParallel(_twelve(), use_orig_params=True, device_id=torch.device("cpu"))

    def shown() -> list[Tensor]:
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            return [parameter.detach().clone() for parameter in wrapped.parameters()]

    return _trained(wrapped, shown)


def _trained_flat() -> list[Tensor]:
    return _trained_by_reference(toys.flat(_twelve(), units=["0"]))


def _trained_rows() -> list[Tensor]:
    return _trained_by_reference(toys.per_parameter(_twelve(), units=["0"]))


def _trained_by_reference(model: Any) -> list[Tensor]:
    x, y, found = _real(4, 2, seed=1), _real(4, 1, seed=2), []

    def noted(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = toys.loss(outputs, targets)
        found.append(losses.detach())
        return losses

    trainer = toys.trainer(model, optimizer=_momentum, normaliser=4)
    trainer.loss = noted
    for _ in range(STEPS):
        trainer.step([impl("trainer").MicroBatch(x, y, range(4))])
    values = model.full_values()
    return found + [values[name].reshape(-1) for name, _ in _twelve().named_parameters()]


@claim("B2", "With several ranks results are only approximately those of one, and that is normal.")
def several_ranks_are_exact(lab: Lab) -> Outcome:
    """One step at W = 1 to 8: on integers in float64, and on real numbers against the bound of a sum of W terms."""
    worlds = (2, 3, 4, 5, 6, 7, 8)
    exact = {way: sum(_apart(lab, way, w) for w in worlds) for way in toys.WAYS}
    inside, outside, rounded = 0, 0, 0
    for world_size in worlds:
        real = _real_gradients(lab, world_size)
        inside, outside, rounded = inside + real[0], outside + real[1], rounded + real[2]
    return Outcome(
        only_if(
            "sums round; on exactly representable data every bit is equal at every W",
            under_it=rounded > 0 and outside == 0,
            otherwise=any(exact.values()),
        ),
        f"W = 2 to 8, elements that differ from W = 1 on integers: {exact}; on real numbers {rounded} of"
        f" {inside + outside} gradient elements differ from one device's, {outside} by more than the proven bound"
        " u sum|terms| for a sum of the ranks' terms",
    )


def _apart(lab: Lab, way: str, world_size: int) -> int:
    """Elements of the parameters after a step at W ranks that differ from those at one."""

    def body(rank: int, size: int) -> dict[str, Tensor]:
        model = toys.WAYS[way](toys.network())
        toys.trainer(model, normaliser=8).step(toys.micro_batches([toys.share(rank, size)]))
        values: dict[str, Tensor] = model.full_values()
        return values

    wanted = lab.ranks(lambda rank: body(rank, 1), 1)[0]
    # W divides nothing by itself here: N = 8 and W / N weigh samples; a W that is no power of two rounds once
    found = lab.ranks(lambda rank: body(rank, world_size), world_size)
    return max(toys.different(values, wanted) for values in found)


def _real_gradients(lab: Lab, world_size: int) -> tuple[int, int, int]:
    """(elements within the bound, beyond it, different from the whole batch's on one device)."""
    x, y = _real(toys.SAMPLES, 3, seed=3).double(), _real(toys.SAMPLES, 2, seed=4).double()

    def local(rows: list[int], weight: float) -> list[Tensor]:
        module = toys.network()
        losses = toys.loss(module(x[rows]), y[rows])
        return list(torch.autograd.grad(losses, list(module.parameters()), torch.full_like(losses, weight)))

    def body(rank: int) -> dict[str, Tensor]:
        rows = toys.share(rank, world_size)
        trainer = toys.trainer(toys.flat(toys.network()))
        trainer.step([impl("trainer").MicroBatch(x[rows], y[rows], rows)])
        gradients: dict[str, Tensor] = trainer.model.full_gradients()
        return gradients

    named = lab.ranks(body, world_size)[0]
    got = torch.cat([named[name].reshape(-1) for name, _ in toys.network().named_parameters()])
    one = torch.cat([gradient.reshape(-1) for gradient in local(list(range(toys.SAMPLES)), 1 / toys.SAMPLES)])
    parts = [local(toys.share(rank, world_size), world_size / toys.SAMPLES) for rank in range(world_size)]
    terms = torch.stack([torch.cat([gradient.reshape(-1) for gradient in part]) for part in parts])
    within = sum(
        _within(value, list(column), world_size) for value, column in zip(got.tolist(), terms.T.tolist(), strict=True)
    )
    return within, len(got) - within, int((got != one).sum())


def _within(value: float, terms: list[float], world_size: int) -> bool:
    """|value - mean| <= u sum|terms|: W - 1 additions in any order and a division, to nearest (Higham 2002, 4.2)."""
    unit, total = Fraction(1, 2**53), sum(map(Fraction, terms), Fraction(0))
    size = sum(map(abs, map(Fraction, terms)), Fraction(0))
    bound = unit * size * (1 + unit)
    return abs(Fraction(value) - total / world_size) <= bound


@claim("B3", "Shards are equal pieces of ceil(n/W) elements: n=10, W=3 gives 4, 4, 2 and 2 of padding.")
def shards_are_equal_pieces(lab: Lab) -> Outcome:
    """Every n to 40 and W to 9: sizes, and that the real parts cover the parameters once; then a unit without any."""
    wrong, all_padding, example = 0, 0, [_shard(10, 3, rank) for rank in range(3)]
    for numel in range(1, 41):
        for world_size in range(1, 10):
            buffers = [_shard(numel, world_size, rank) for rank in range(world_size)]
            size = -(-numel // world_size)
            covered = [i for start, real, _ in buffers for i in range(start, start + real)]
            wrong += covered != list(range(numel)) or any(real + padding != size for _, real, padding in buffers)
            all_padding += sum(real == 0 for _, real, _ in buffers)
    empty = lab.ranks(_step_with_an_empty_unit, 3)
    right = [(real, padding) for _, real, padding in example] == [(4, 0), (4, 0), (2, 2)]
    return Outcome(
        verdict(right and wrong == 0 and all(empty)),
        f"n = 10, W = 3: {', '.join(f'{real}+{padding}' for _, real, padding in example)}; {wrong} of {40 * 9}"
        " pairs of n"
        f" to 40 and W to 9 otherwise, {all_padding} shards are padding altogether; a step with a unit of no parameters"
        f" ends on {sum(empty)} of 3 ranks",
    )


def _shard(numel: int, world_size: int, rank: int) -> tuple[int, int, int]:
    """(start, real elements, padding) of a rank's shard."""
    axis = impl("sharding.collectives").Axis(None, rank, world_size)
    buffer = impl("sharding.flat_buffer").FlatBuffer({"weight": nn.Parameter(torch.zeros(numel))}, axis, True)
    return buffer.start, buffer.real, buffer.shard.numel() - buffer.real


def _step_with_an_empty_unit(rank: int) -> bool:
    module = nn.Sequential(nn.Sequential(nn.ReLU()), nn.Linear(3, 2)).double()
    toys.trainer(toys.flat(module, units=["0"])).step(toys.micro_batches([toys.share(rank, 3)]))
    return True


_MODEL = ModelSpec((LayerSpec(3, bias=True, activation="relu"), LayerSpec(2)), features=3, units=(1,))


@claim("B5", "Gradients are summed by a reduce-scatter and divided by W once; at W=1 they are divided by nothing.")
def gradients_are_averaged_once(lab: Lab) -> Outcome:
    """Released gradients against the oracle's, bit for bit, in every situation; the reductions are counted."""
    shapes = {
        "W=1": (MeshSpec(), BatchLayout("contiguous", 4), StepSpec(normaliser=4)),
        "W=3": (MeshSpec(dp_shard=3), BatchLayout("contiguous", 6), StepSpec(normaliser=4)),
        "uneven": (MeshSpec(dp_shard=3), BatchLayout("ragged", 5, counts=(4, 0, 1)), StepSpec(normaliser=4)),
        "accumulated": (
            MeshSpec(dp_shard=2),
            BatchLayout("contiguous", 6),
            StepSpec(normaliser=4, micro_batches=3, sync_every=False),
        ),
        "reduced each time": (
            MeshSpec(dp_shard=2), BatchLayout("contiguous", 6), StepSpec(normaliser=4, micro_batches=3)
        ),
        "HSDP": (MeshSpec(dp_shard=2, dp_replicate=2), BatchLayout("contiguous", 6), StepSpec(normaliser=4)),
    }  # fmt: skip
    wrong, reductions = [], {}
    for adapter in ("reference", "fully_shard", "fsdp1"):
        run = lab.run(adapter)
        for name, (mesh, layout, step) in shapes.items():
            case = TrainingCase(_MODEL, mesh, layout, step)
            execution = run(case, observe=("grads",))
            calls = [c for c in execution.ranks[0].trace if c.op in ("reduce_scatter", "all_reduce")]
            if adapter == "reference":
                reductions[name] = len(calls)
            try:
                assert_gradients_equal(execution, run.answer(case))
            except Violation:
                wrong.append(f"{adapter}, {name}")
    return Outcome(
        verdict(not wrong and reductions["W=1"] == 0),
        f"{3 * len(shapes) - len(wrong)} of {3 * len(shapes)} released gradients (reference, fully_shard, fsdp1)"
        " are the"
        f" single device's in every bit{'; not: ' + '; '.join(wrong) if wrong else ''}; the reference's reductions of 2"
        f" units: {reductions}",
    )
