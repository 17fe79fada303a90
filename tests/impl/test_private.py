"""Clipping rules, samples without a finite norm, steps that raise, profiles: on both ways of sharding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdpcheck.impl import clipping, collectives, layout, modes
from fsdpcheck.impl.clipping import Automatic, Flat, PerLayer
from fsdpcheck.impl.collectives import ALONE
from fsdpcheck.impl.modes import Mode
from fsdpcheck.impl.nonfinite import NonFiniteNorm
from fsdpcheck.impl.norms import linear
from fsdpcheck.impl.private import Privacy
from fsdpcheck.impl.profile import Profile
from fsdpcheck.impl.step import MicroBatch, Options, Trainer
from fsdpcheck.impl.wrap import ShardedModel

from .ways import WAYS, integers, sgd

if TYPE_CHECKING:
    from .conftest import Ranks

BOOKKEEPING = Mode(passes="bookkeeping")
SIZES = {1: [4], 2: [3, 1], 3: [2, 0, 2]}


def network() -> nn.Sequential:
    built = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 2))).double()
    for seed, parameter in enumerate(built.parameters()):
        parameter.data = integers(*parameter.shape, seed=seed)
    return built


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1)


X, Y = integers(4, 3, seed=20), integers(4, 2, seed=21)


def per_sample(module: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Each sample's gradients, by plain autograd."""
    found = []
    for i in range(len(x)):
        module.zero_grad()
        loss(module(x[i : i + 1]), y[i : i + 1]).sum().backward()  # type: ignore[no-untyped-call]
        found.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    return found


def stepped(way: str, rank: int, world_size: int, privacy: Privacy, x: Tensor, profile: Any = None) -> Trainer:
    """A trainer after one step with N = W, so that a sample weighs 1 and average times W is the sum."""
    start = sum(SIZES[world_size][:rank])
    rows = list(range(start, start + SIZES[world_size][rank]))
    options = Options(normaliser=world_size, privacy=privacy)
    more = {} if profile is None else {"profile": profile}
    trainer = Trainer(WAYS[way](network(), ["0", "1"], True), loss, sgd, options, **more)
    trainer.step([MicroBatch(x[rows], Y[rows], rows)])
    return trainer


# -- clipping rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_per_layer_clipping_bounds_each_group_by_itself(ranks: Ranks, way: str, world_size: int) -> None:
    """Groups that split a layer, factors of each group by the definition, on gradients that are exact."""
    rule = PerLayer({"0": 2.0**40, "1.0.weight": 2.0**40, "": 1.0})
    samples = per_sample(network(), X, Y)
    squared = torch.tensor([[_squared(g, "0"), _squared(g, "1.0.weight"), _squared(g, "1.0.bias")] for g in samples]).T

    def found(rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        trainer = stepped(way, rank, world_size, Privacy(rule, BOOKKEEPING), X)
        return torch.cat(trainer.found.factors, 1), torch.cat(trainer.found.norms), trainer.model.full_gradients()

    start = 0
    for factors, norms, gradients in ranks(found, world_size):
        stop = start + factors.shape[1]
        wanted = rule.factors(squared[:, start:stop].double())
        assert torch.equal(factors, wanted)
        assert torch.equal(norms, squared[:, start:stop].sum(0).double().sqrt())
        assert torch.equal(gradients["0.0.weight"] * world_size, sum(g["0.0.weight"] for g in samples))  # type: ignore[arg-type]
        assert torch.equal(gradients["1.0.weight"] * world_size, sum(g["1.0.weight"] for g in samples))  # type: ignore[arg-type]
        bound = sum(1.0 for g in samples if g["1.0.bias"].any())
        assert gradients["1.0.bias"].norm() * world_size <= bound
        start = stop


def _squared(gradients: dict[str, Tensor], prefix: str) -> float:
    return sum(float(g.square().sum()) for name, g in gradients.items() if name.startswith(prefix))


def test_sensitivities() -> None:
    assert Flat(3.0).sensitivity == 3
    assert Automatic(3.0).sensitivity == 3
    assert PerLayer({"a": 3.0, "b": 4.0}).sensitivity == 5


def test_automatic_clipping_by_its_definition() -> None:
    squared = torch.tensor([0.0, 4.0, 9.0, 1e8], dtype=torch.float64)
    assert torch.equal(Automatic(2.0, 1.0).factors(squared), 2 / (squared.sqrt() + 1))
    assert Automatic(2.0, 0.0).factors(squared).tolist() == [0.0, 1.0, 2 / 3, 2e-4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Flat(0.0), "got 0.0 as clip_norm, wanted a positive finite number"),
        (lambda: Flat(math.inf), "got inf as clip_norm"),
        (lambda: Automatic(1.0, -1.0), "got gamma -1.0"),
        (lambda: PerLayer({}), "got no bounds"),
        (lambda: PerLayer({"a": -1.0}), "the clip norm of a, wanted a positive"),
        (lambda: PerLayer({"a": 1.0}).group_of("b.weight"), "parameter b.weight is in no clipping group, groups are a"),
        (lambda: Privacy(PerLayer({"": 1.0})).mode_in_force(), "per-layer clipping in two passes.*ghost_bk"),
        (lambda: Privacy(Flat(1.0), nonfinite="drop").mode_in_force(), "nonfinite='drop' in two passes.*ghost_bk"),
    ],
)
def test_bad_rules_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_longest_prefix_decides_and_is_not_a_mere_beginning() -> None:
    rule = clipping.PerLayer({"layer1": 1.0, "layer1.weight": 2.0, "": 3.0})
    assert [rule.group_of(name) for name in ("layer1.bias", "layer1.weight", "layer10.bias")] == [0, 1, 2]


# -- samples without a finite norm ------------------------------------------------------------------------------------


def with_bad(value: float) -> Tensor:
    x = X.clone()
    x[3] = value
    return x


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_every_rank_raises_and_names_sample_and_rank(ranks: Ranks, way: str, world_size: int, bad: float) -> None:
    def message(rank: int) -> tuple[str, dict[int, int]]:
        with pytest.raises(NonFiniteNorm, match="sample 3 on rank") as caught:
            stepped(way, rank, world_size, Privacy(Flat(1.0)), with_bad(bad))
        return str(caught.value), caught.value.samples

    last = [rank for rank, size in enumerate(SIZES[world_size]) if size][-1]
    found = ranks(message, world_size)
    assert found == [found[0]] * world_size
    assert found[0][1] == {last: 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_dropped_samples_leave_the_rest_as_if_they_were_not_there(
    ranks: Ranks, way: str, world_size: int, bad: float
) -> None:
    wanted = [g for i, g in enumerate(per_sample(network(), X, Y)) if i != 3]
    privacy = Privacy(Flat(2.0**40), BOOKKEEPING, nonfinite="drop")

    def found(rank: int) -> tuple[dict[str, Tensor], list[int]]:
        trainer = stepped(way, rank, world_size, privacy, with_bad(bad))
        return trainer.model.full_gradients(), trainer.found.nonfinite

    results = ranks(found, world_size)
    assert sorted(index for _, bad_ones in results for index in bad_ones) == [3]
    for gradients, _ in results:
        for name, gradient in gradients.items():
            assert torch.equal(gradient * world_size, sum(g[name] for g in wanted))  # type: ignore[arg-type]


# -- a step that raises -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", [Mode(), BOOKKEEPING], ids=["two_pass", "bookkeeping"])
@pytest.mark.parametrize("way", WAYS)
def test_after_an_exception_the_next_step_is_clean(ranks: Ranks, way: str, mode: Mode, where: str) -> None:
    """All ranks raise in a step; the next one equals the first step of a fresh trainer."""

    def explode(*_: Any) -> None:
        raise KeyError("on purpose")

    def run(broken: bool) -> Any:
        def gradients(rank: int) -> dict[str, Tensor]:
            module = network()
            options = Options(normaliser=2, privacy=Privacy(Flat(2.0**40), mode))
            trainer = Trainer(WAYS[way](module, ["0", "1"], True), loss, sgd, options)
            micro = MicroBatch(X[[rank]], Y[[rank]], [rank])
            if broken:
                layer = module[0][0]
                handle = (
                    layer.register_forward_hook(explode)
                    if where == "forward"
                    else layer.register_full_backward_hook(explode)
                )
                with pytest.raises(KeyError, match="on purpose"):
                    trainer.step([micro])
                handle.remove()
            trainer.step([micro])
            return trainer.model.full_gradients()

        return gradients

    wanted, got = ranks(run(False), 2), ranks(run(True), 2)
    for one, other in zip(got, wanted, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


# -- layouts from the samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_layouts_are_found_out_from_the_rows(ranks: Ranks, world_size: int) -> None:
    def detected(batches: list[Tensor]) -> list[str]:
        return ranks(lambda rank: layout.detect(batches[rank], collectives.axis()), world_size)

    assert detected([X] * world_size) == ["replicated"] * world_size
    assert detected([X[[rank]] for rank in range(world_size)]) == ["distributed"] * world_size
    assert detected([X[:0], *[X] * (world_size - 1)]) == ["distributed"] * world_size
    assert detected([X, *[X.flip(0)] * (world_size - 1)]) == ["distributed"] * world_size
    assert detected([X, *[X.float()] * (world_size - 1)]) == ["distributed"] * world_size


@pytest.mark.parametrize("rows", [X[:0], X[:1], X[[0, 1, 0]]], ids=["none", "one", "repeated"])
def test_equal_rows_that_tell_nothing_are_an_error_on_all_ranks(ranks: Ranks, rows: Tensor) -> None:
    def ask(rank: int) -> str:
        with pytest.raises(layout.AmbiguousLayout) as caught:
            layout.detect(rows, collectives.axis())
        return str(caught.value)

    found = ranks(ask, 3)
    assert found == [found[0]] * 3
    assert "say which with Options.layout" in found[0]


def test_one_rank_has_its_own_samples() -> None:
    assert layout.detect(X[:1], ALONE) == "distributed"


# -- profiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode(), BOOKKEEPING], ids=["two_pass", "bookkeeping"])
def test_a_profile_counts_parts_and_layers(ranks: Ranks, mode: Mode) -> None:
    def profiled(rank: int) -> Profile:
        profile = Profile(rank)
        stepped("flat", rank, 2, Privacy(Flat(1.0), mode), X, profile)
        return profile

    for rank, profile in enumerate(ranks(profiled, 2)):
        entered = {part: times for part, times, _ in profile.table()}
        last = "second backward" if mode.passes == "two_pass" else "weighted gradients"
        assert {part: times for part, times in entered.items() if "/" not in part} == dict.fromkeys(
            ["forward", "first backward", "aggregation", "clip factors", last, "reduction", "noise", "update"], 1
        )
        assert sum(times for part, times in entered.items() if "/norms of " in part) == 2
        events = profile.trace_events()
        assert {event["pid"] for event in events} == {rank}
        assert all(event["dur"] >= 0 and event["ph"] == "X" for event in events)


# -- mixed precision, meta device, activation checkpointing -----------------------------------------------------------


def on_ranks(ranks: Ranks, way: str, world_size: int, make: Any, privacy: Privacy | None, **more: Any) -> list[Any]:
    """Gradients times W, norms and parameters of one step of ``make()`` on every rank's share of X."""

    def run(rank: int) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        rows = [row for row in range(len(X)) if row % world_size == rank]
        options = Options(normaliser=world_size, privacy=privacy)
        trainer = Trainer(WAYS[way](make(), ["0", "1"], True, **more), loss, sgd, options)
        assert all(shard.dtype == torch.float64 for shard in trainer.model.shards())
        trainer.step([MicroBatch(X[rows], Y[rows], rows)])
        norms = torch.cat(trainer.found.norms) if privacy else torch.empty(0)
        return trainer.model.full_gradients(), norms, trainer.model.full_values()

    return ranks(run, world_size)


class Casting(nn.Module):
    """Inputs to bfloat16, outputs back to float64."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16 if x.dtype == torch.float64 else torch.float64)


def casting() -> nn.Sequential:
    layers = list(network())
    return nn.Sequential(nn.Sequential(Casting(), *layers[0]), nn.Sequential(*layers[1], Casting()))


@pytest.mark.parametrize("mode", [Mode(), BOOKKEEPING], ids=["two_pass", "bookkeeping"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_computing_in_bfloat16_on_small_integers_is_exact(ranks: Ranks, way: str, world_size: int, mode: Mode) -> None:
    """Values of these networks fit 8 bits, so every rounding that is wanted is none: the float64 answer comes out."""
    samples = per_sample(network(), X, Y)
    norms = torch.tensor([_squared(g, "") for g in samples], dtype=torch.float64).sqrt()
    privacy = Privacy(Flat(2.0**40), mode)
    found = on_ranks(ranks, way, world_size, casting, privacy, compute_dtype=torch.bfloat16)
    for rank, (gradients, got, values) in enumerate(found):
        assert torch.equal(got, norms[[row for row in range(len(X)) if row % world_size == rank]])
        assert {value.dtype for value in values.values()} == {torch.float64}
        for name, gradient in gradients.items():
            layer, index, parameter = name.split(".")
            plain = f"{layer}.{int(index) - (layer == '0')}.{parameter}"
            assert torch.equal(gradient * world_size, sum(g[plain] for g in samples))  # type: ignore[arg-type]


def test_norms_are_not_squared_in_half_precision(ranks: Ranks) -> None:
    """2**8 + 1 has no square in bfloat16, and not even a representation: the sum of two is formed in float32."""
    x = torch.full((1, 2), 16.0).double()

    def norm(rank: int) -> float:
        module = nn.Sequential(Casting(), nn.Linear(2, 1, bias=False).double(), Casting())
        module[1].get_parameter("weight").data.fill_(1)
        model = WAYS["flat"](module, [], True, compute_dtype=torch.bfloat16)
        trainer = Trainer(model, lambda y, t: y.sum(1) * 1.0, sgd, Options(normaliser=1, privacy=Privacy(Flat(1.0))))
        trainer.step([MicroBatch(torch.cat([x, x + 1]), X[:2], [0, 1])])
        return float(trainer.found.norms[0][1])

    assert ranks(norm, 1) == [math.sqrt(2 * 17.0**2)]


def test_losses_in_half_precision_are_refused(ranks: Ranks) -> None:
    def refused(rank: int) -> str:
        model = WAYS["flat"](network().bfloat16(), [], True)
        trainer = Trainer(model, loss, sgd, Options(normaliser=1, privacy=Privacy(Flat(1.0))))
        with pytest.raises(TypeError, match=r"losses in torch\.bfloat16.*cast to float32") as caught:
            trainer.step([MicroBatch(X.bfloat16(), Y.bfloat16(), [0, 1, 2, 3])])
        return str(caught.value)

    assert ranks(refused, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_on_the_meta_device_is_given_its_values_by_name(ranks: Ranks, way: str, world_size: int) -> None:
    real = {name: parameter.detach() for name, parameter in network().named_parameters()}

    def meta() -> nn.Module:
        return network().to("meta")

    privacy = Privacy(Flat(2.0**40))
    wanted = on_ranks(ranks, way, world_size, network, privacy)
    got = on_ranks(ranks, way, world_size, meta, privacy, initial=lambda name, shape: real[name].clone())
    for one, other in zip(got, wanted, strict=True):
        assert all(torch.equal(one[2][name], other[2][name]) for name in real)


@pytest.mark.parametrize("way", WAYS)
def test_values_of_a_meta_model_are_asked_for(ranks: Ranks, way: str) -> None:
    def refused(rank: int) -> tuple[str, str]:
        with pytest.raises(ValueError, match=r"\.weight is on the meta device: give its values") as missing:
            WAYS[way](network().to("meta"), ["0", "1"], True)
        with pytest.raises(ValueError, match=r"gave \(1,\), wanted \(") as wrong:
            WAYS[way](network().to("meta"), ["0", "1"], True, initial=lambda name, shape: torch.ones(1))
        return str(missing.value), str(wrong.value)

    assert len(ranks(refused, 2)) == 2


class Checkpointed(nn.Module):
    """Recomputes ``inner`` in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("privacy", [None, Privacy(Flat(1.0)), Privacy(Flat(1.0), BOOKKEEPING)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_activation_checkpointing_changes_no_bit(ranks: Ranks, way: str, privacy: Privacy | None) -> None:
    def recomputing() -> nn.Sequential:
        return nn.Sequential(*(Checkpointed(layer) for layer in network()))

    wanted, got = (on_ranks(ranks, way, 2, make, privacy) for make in (network, recomputing))
    for (gradients, norms, _), (other, other_norms, _) in zip(got, wanted, strict=True):
        assert torch.equal(norms, other_norms)
        assert all(torch.equal(gradients[name.replace(".", ".inner.", 1)], other[name]) for name in other)


# -- modes that are really different ----------------------------------------------------------------------------------


@pytest.mark.parametrize("norms", ["ghost", "flash"])
@pytest.mark.parametrize("passes", ["two_pass", "bookkeeping"])
def test_a_mode_runs_what_it_says(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, norms: Any, passes: Any) -> None:
    """Kernels are called in "flash" only, contractions in "bookkeeping" only; the bits are the same."""
    called: list[str] = []

    def counted(name: str, original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            called.append(name)
            return original(*arguments)

        return call

    monkeypatch.setattr(linear, "flash_squared_norm", counted("flash", linear.flash_squared_norm))
    monkeypatch.setattr(linear, "squared_norm", counted("ghost", linear.squared_norm))
    monkeypatch.setattr(linear, "weighted_gradient", counted("bookkeeping", linear.weighted_gradient))

    def run(rank: int) -> dict[str, Tensor]:
        return stepped("flat", rank, 1, Privacy(Flat(2.0**40), Mode(norms, passes)), X).model.full_gradients()

    gradients = ranks(run, 1)[0]
    assert set(called) == {norms, *({"bookkeeping"} if passes == "bookkeeping" else ())}
    for name, gradient in gradients.items():
        assert torch.equal(gradient, sum(g[name] for g in per_sample(network(), X, Y)))  # type: ignore[arg-type]


def test_the_environment_decides_at_the_next_step(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> list[str]:
        trainer = stepped("flat", rank, 1, Privacy(Flat(1.0)), X)
        assert trainer.private is not None
        seen = [trainer.private.mode.passes]
        for name in ("flash_bk_fsdp", "ghost"):
            monkeypatch.setenv(modes.ENVIRONMENT, name)
            trainer.step([MicroBatch(X, Y, [0, 1, 2, 3])])
            seen.append(trainer.private.mode.passes)
        return seen

    assert ranks(run, 1) == [["two_pass", "bookkeeping", "two_pass"]]


# -- layouts over two axes, and losses that are none ------------------------------------------------------------------


@pytest.mark.parametrize("contribution", ["complete", "partial", "mixed"])
@pytest.mark.parametrize("over", ["shards", "replicas", "both", "neither"])
def test_layouts_over_a_mesh_of_two_axes(ranks: Ranks, over: str, contribution: Any) -> None:
    """2 x 2 ranks: the same samples inside a shard group, over replicas, everywhere or nowhere; the sum is the same."""
    shards: layout.Layout = "replicated" if over in ("shards", "both") else "distributed"
    replicas: layout.Layout = "replicated" if over in ("replicas", "both") else "distributed"
    layouts = layout.Layouts(shards, replicas)
    if shards == "distributed" and contribution != "complete":
        pytest.skip("refused: elements and samples would be split the same way")
    samples = per_sample(network(), X, Y)

    def run(rank: int) -> tuple[layout.Layouts, dict[str, Tensor], Tensor, list[int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        shard_axis, replica_axis = (collectives.axis(mesh.get_group(name)) for name in ("shards", "replicas"))
        model = ShardedModel(network(), ["0", "1"], shard_axis, True, replica_axis)
        rows = list(range(4))
        rows = rows[shard_axis.rank :: 2] if shards == "distributed" else rows
        rows = rows[replica_axis.rank * len(rows) // 2 :][: len(rows) // 2] if replicas == "distributed" else rows
        options = Options(4, layouts, Privacy(Flat(2.0**40), contribution=contribution))
        trainer = Trainer(model, loss, sgd, options)
        trainer.step([MicroBatch(X[rows], Y[rows], rows)])
        seen = layouts if len(rows) < 2 else layout.detect_both(X[rows], shard_axis, replica_axis)
        return seen, model.full_gradients(), trainer.found.norms[0], rows

    norms = torch.tensor([_squared(g, "") for g in samples], dtype=torch.float64).sqrt()
    for seen, gradients, own, rows in ranks(run, 4):
        assert seen == layouts
        assert torch.equal(own, norms[rows])
        for name, gradient in gradients.items():
            assert torch.equal(gradient * 4, sum(g[name] for g in samples))  # type: ignore[arg-type]


@pytest.mark.parametrize("reduced", [lambda y, t: y.sum(), lambda y, t: y, lambda y, t: y.sum(1)[:-1]])
def test_a_loss_that_is_not_one_number_a_sample_is_refused(ranks: Ranks, reduced: Any) -> None:
    def refused(rank: int) -> str:
        trainer = Trainer(WAYS["flat"](network(), [], True), reduced, sgd, Options(1))
        with pytest.raises(ValueError, match=r"for 4 samples, wanted \(4,\), one a sample.*reduction='none'") as caught:
            trainer.step([MicroBatch(X, Y, [0, 1, 2, 3])])
        return str(caught.value)

    assert ranks(refused, 1)


def test_samples_without_numbers_are_refused(ranks: Ranks) -> None:
    def refused(rank: int) -> str:
        trainer = Trainer(WAYS["flat"](network(), [], True), loss, sgd, Options(1))
        with pytest.raises(ValueError, match="got 2 indices for 4 samples") as caught:
            trainer.step([MicroBatch(X, Y, [0, 1])])
        return str(caught.value)

    assert ranks(refused, 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_changed_after_sharding_is_named(ranks: Ranks, way: str) -> None:
    def refused(rank: int) -> str:
        module = network()
        trainer = Trainer(WAYS[way](module, ["0"], True), loss, sgd, Options(1))
        module[1][0].weight = nn.Parameter(torch.ones(2, 4).double())
        with pytest.raises(RuntimeError, match=r"parameter 1\.0\.weight was replaced after sharding") as caught:
            trainer.step([MicroBatch(X, Y, [0, 1, 2, 3])])
        return str(caught.value)

    assert ranks(refused, 2)
