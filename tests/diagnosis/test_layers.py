"""Norm rules of single kinds of layers gone wrong: what a mistake adds to squared norms, and that it is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdpcheck import diagnosis, oracle
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.case.model import LayerKind
from fsdpcheck.checks._read import local_rows
from fsdpcheck.diagnosis import layer_norm_rules, norm_rules
from fsdpcheck.diagnosis.layer_calls import Seen
from fsdpcheck.findings.cause import named
from fsdpcheck.workload import batches, models


def _numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).double()


def _told(found: layer_norm_rules.Told) -> dict[str, Tensor]:
    return {key: delta for key, _, delta in found}


def _square(x: Tensor) -> Tensor:
    return x.square().flatten(1).sum(1)


def test_products_without_cross_terms_and_in_halves() -> None:
    a, g = _numbers(4, 5, 3), _numbers(4, 5, 2)
    told = _told(layer_norm_rules.of_products(a, g))
    right = _square(torch.einsum("ntp,ntd->npd", g, a))
    apart = torch.stack([_square(torch.einsum("np,nd->npd", g[:, t], a[:, t])) for t in range(5)]).sum(0)
    assert torch.equal(right + told["weight: no cross terms"], apart)
    halves = [_square(torch.einsum("ntp,ntd->npd", g[:, part], a[:, part])) for part in (slice(0, 2), slice(2, 5))]
    assert torch.equal(right + told["weight: halves"], halves[0] + halves[1])


def _convolved(conv: nn.Conv2d, x: Tensor, g: Tensor) -> Tensor:
    """Squared norm of the weight's gradient, by autograd."""
    weight = conv.weight.detach().clone().requires_grad_()
    out = F.conv2d(x, weight, None, conv.stride, 0, conv.dilation, conv.groups)
    return torch.stack([
        torch.autograd.grad(out[i], weight, g[i], retain_graph=True)[0].square().sum() for i in range(len(x))
    ])  # fmt: skip


def test_groups_and_patches_of_a_convolution() -> None:
    conv = nn.Conv2d(4, 4, 2, padding=1, groups=2, bias=False).double()
    x, g = _numbers(3, 4, 3, 3), _numbers(3, 4, 4, 4)
    told = _told(layer_norm_rules.of_convolution(conv, x, g))
    right = _convolved(conv, F.pad(x, (1, 1, 1, 1)), g)
    dealt = x[:, [0, 2, 1, 3]]
    assert torch.equal(right + told["convolution: groups"], _convolved(conv, F.pad(dealt, (1, 1, 1, 1)), g))
    later = g.flatten(2).roll(-1, 2).reshape(g.shape)
    assert torch.equal(right + told["convolution: late"], _convolved(conv, F.pad(x, (1, 1, 1, 1)), later))


def test_an_odd_element_of_padding_at_the_wrong_end() -> None:
    """Padding of three elements for a kernel of two, dilated by three: one before the input and two behind it."""
    conv = nn.Conv2d(2, 3, 2, padding="same", dilation=(3, 2), bias=False).double()
    x, g = _numbers(3, 2, 4, 4), _numbers(3, 3, 4, 4)
    told = _told(layer_norm_rules.of_convolution(conv, x, g))
    right, weight = _convolved(conv, F.pad(x, (1, 1, 1, 2)), g), conv.weight.detach()
    assert torch.equal(conv(x), F.conv2d(F.pad(x, (1, 1, 1, 2)), weight, None, 1, 0, conv.dilation))
    assert torch.equal(right + told["convolution: odd padding"], _convolved(conv, F.pad(x, (1, 1, 2, 1)), g))
    even = nn.Conv2d(2, 3, 3, padding="same", bias=False).double()
    assert "convolution: odd padding" not in _told(layer_norm_rules.of_convolution(even, x, g))


def test_a_convolution_without_padding_by_word() -> None:
    conv = nn.Conv2d(2, 3, 2, padding="valid", bias=False).double()
    x, g = _numbers(3, 2, 4, 4), _numbers(3, 3, 3, 3)
    told = _told(layer_norm_rules.of_convolution(conv, x, g))
    assert told.keys() >= {"convolution: late"}
    assert "convolution: odd padding" not in told


@pytest.mark.parametrize("made", [lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4), lambda: nn.GroupNorm(2, 4)])
def test_raw_inputs_and_wrong_groups_of_layers_that_normalise(made: Callable[[], nn.Module]) -> None:
    norm = made().double()
    x, g = _numbers(3, 4, 4), _numbers(3, 4, 4)
    told = _told(layer_norm_rules.of_norm_layer(norm, x, g))
    positions = 2 if isinstance(norm, nn.GroupNorm) else 1
    right = _square((norm(x) * g).sum(positions))
    torch.testing.assert_close(right + told[f"{type(norm).__name__}: raw input"], _square((x * g).sum(positions)))
    whole = told.get("GroupNorm: all channels")
    assert (whole is None) != isinstance(norm, nn.GroupNorm)
    if whole is not None:
        torch.testing.assert_close(right + whole, _square((F.group_norm(x, 1) * g).sum(2)))


def _case(model: ModelSpec) -> TrainingCase:
    step = StepSpec(clipping="probe", clip_norm=16, normaliser=4)
    return TrainingCase(model, MeshSpec(1), BatchLayout("strided", 4), step, Arithmetic("float64", 2, 2), seed=3)


TIED = ModelSpec((LayerSpec(3), LayerSpec(3)), features=3, input="sequence", length=2, tied=(0, 1))
BAGS = ModelSpec((LayerSpec(3),), features=2, input="bags", length=4, vocabulary=3)
TOKENS = ModelSpec((LayerSpec(3),), features=2, input="tokens", length=4, vocabulary=3)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (TIED, "tied (shared) weight are measured apart"),
        (BAGS, "a token that occurs twice in a bag"),
        (TOKENS, "a token that occurs twice in a sample"),
    ],
)
def test_cross_terms_of_tied_weights_and_of_tokens_are_named(model: ModelSpec, words: str) -> None:
    answer = oracle.answer(_case(model))
    step, rows = answer.steps[0], local_rows(answer.case, 0, 0, answer.steps[0].samples)
    missing = _cross_terms(answer)
    assert bool(missing.any())
    said = named(diagnosis.of_norms(answer, 0, 0, (step.squared_norms - missing).sqrt()[rows]))
    assert words in said
    assert words not in named(diagnosis.of_norms(answer, 0, 0, (step.squared_norms - missing / 2).sqrt()[rows]))


def _cross_terms(answer: oracle.Answer) -> Tensor:
    """[n]: what the squared norm has of products of two uses of the first weight, by autograd, one sample at a time."""
    case, step = answer.case, answer.steps[0]
    found = []
    for sample, target in zip(step.samples, step.targets, strict=True):
        model = models.build(case).double()
        uses: list[Tensor] = []
        packed = torch.cat([batches.targets(case)[sample].double(), target]).unsqueeze(0)
        _by_use(model, model.tail[0], uses)
        data = batches.inputs(case)[sample : sample + 1]
        loss = models.loss_for(case)(model(data if not data.is_floating_point() else data.double()), packed).sum()
        gradients = [use for use in torch.autograd.grad(loss, uses)]
        if case.model.tied is None:
            gradients = _by_token(gradients[0], data, case.model.vocabulary)
        apart = sum(float(each.square().sum()) for each in gradients)
        found.append(float(torch.stack(gradients).sum(0).square().sum()) - apart)
    return torch.tensor(found, dtype=torch.float64)


def _by_use(model: nn.Module, layer: nn.Module, uses: list[Tensor]) -> None:
    """Give every layer that shares the weight a copy of its own; ``uses``: what to differentiate by."""
    shared = layer.weight
    for module in model.modules():
        if getattr(module, "weight", None) is shared and isinstance(module, nn.Linear):
            module.weight = nn.Parameter(shared.detach().clone())
            uses.append(module.weight)
        elif module is layer:
            module.register_forward_hook(lambda m, i, o: uses.append(o))


def _by_token(g: Tensor, tokens: Tensor, vocabulary: int) -> list[Tensor]:
    """The rows that each token adds to an embedding's gradient, of [1, T, p] or of a bag's [1, p]."""
    hot = F.one_hot(tokens[0], vocabulary).double()
    rows = g[0] if g.dim() == 3 else g.expand(len(hot), -1)
    return [torch.outer(hot[t], rows[t]) for t in range(len(hot))]


def test_uses_of_one_position_each_do_not_tell_uses_from_positions() -> None:
    answer = oracle.answer(_case(ModelSpec((LayerSpec(3), LayerSpec(3)), features=3, tied=(0, 1))))
    step, rows = answer.steps[0], local_rows(answer.case, 0, 0, answer.steps[0].samples)
    missing = _cross_terms(answer)
    assert bool(missing.any())
    assert named(diagnosis.of_norms(answer, 0, 0, (step.squared_norms - missing).sqrt()[rows])) == ""


@pytest.mark.parametrize("kind", ["linear", "layer_norm", "rms_norm", "attention"])
def test_causes_are_looked_for_where_a_layer_runs_twice_beside_a_tied_weight(kind: LayerKind) -> None:
    layers = (LayerSpec(2, kind=kind, used="twice"), LayerSpec(2), LayerSpec(2))
    model = ModelSpec(layers, input="sequence", features=2, length=2, tied=(1, 2))
    found = set[str]()
    for seed in range(8):
        step, layout = StepSpec(clipping="probe"), BatchLayout(batch_size=2)
        answer = oracle.answer(TrainingCase(model, layout=layout, step=step, seed=seed))
        found |= {cause.key for cause, _ in norm_rules.candidates(answer, 0)}
    assert "tied: no cross term" in found


@pytest.mark.parametrize("padding_idx", [None, 0])
def test_one_row_for_all_samples_is_no_norm_of_each(padding_idx: int | None) -> None:
    """A row that all samples share is no row of each; norms of the layers beside it are looked at."""
    shared = LayerSpec(2, used="for all")
    spec = ModelSpec(
        (shared, LayerSpec(2, bias=True)), "tokens", features=2, length=2, vocabulary=3, padding_idx=padding_idx
    )
    answer = oracle.answer(_case(spec))
    found = dict(norm_rules.candidates(answer, 0))
    assert {len(delta) for delta in found.values()} == {len(answer.steps[0].samples)}
    keys = {cause.key for cause in found}
    assert "Linear bias: positions apart" in keys
    assert ("embedding: padding row" in keys) == (padding_idx is not None)


def test_of_a_model_without_layers_of_known_rules_no_norm_rule_is_told() -> None:
    """An nn.MultiheadAttention gives two things and multiplies by itself."""
    model = ModelSpec((LayerSpec(2, kind="attention", heads=2),), "sequence", features=2, length=2)
    case = TrainingCase(model, layout=BatchLayout(batch_size=2), step=StepSpec(clipping="probe"))
    assert list(norm_rules.candidates(oracle.answer(case), 0)) == []


def test_a_mean_that_divides_by_padding_too() -> None:
    """Of a bag of three tokens, of which one is padding, and of one of padding alone."""
    module = nn.EmbeddingBag(4, 2, mode="mean", padding_idx=0).double()
    tokens, g = torch.tensor([[1, 2, 0], [1, 1, 0], [0, 0, 0]]), _numbers(3, 2)
    seen = Seen("bag", module, frozenset({"weight"}), tokens, g, False)
    told = {key: delta for key, _, delta in norm_rules._deltas(seen)}

    def squared(divisor: float) -> Tensor:
        once, twice = (g[0] / divisor).square().sum() * 2, (2 * g[1] / divisor).square().sum()
        return torch.stack([once, twice, torch.zeros_like(once)])

    right = squared(2.0)
    torch.testing.assert_close(right + told["EmbeddingBag: divisor"], squared(3.0))
    apart = torch.stack([right[0], (g[1] / 2).square().sum() * 2, right[2]])
    torch.testing.assert_close(right + told["EmbeddingBag: rows not merged"], apart)


def test_another_eps_than_the_layers_own() -> None:
    norm = nn.LayerNorm(4, eps=3.0).double()
    x, g = _numbers(3, 4, 4), _numbers(3, 4, 4)
    told = _told(layer_norm_rules.of_norm_layer(norm, x, g))
    right, wrong = (_square((F.layer_norm(x, (4,), eps=eps) * g).sum(1)) for eps in (3.0, 1e-5))
    torch.testing.assert_close(right + told["LayerNorm: eps"], wrong)


def test_one_use_of_a_tied_weight_alone() -> None:
    layer, weight = nn.Linear(2, 2, bias=False).double(), frozenset({"weight"})
    uses = [Seen(name, layer, weight, _numbers(3, 2), 1 + _numbers(3, 2), True) for name in ("a", "b")]
    uses[1] = uses[1]._replace(activations=2 - _numbers(3, 2))
    told = {key: delta for key, _, delta in norm_rules._of_uses(uses)}
    own = [torch.einsum("np,nd->npd", use.backprops, use.activations) for use in uses]
    right = _square(own[0] + own[1])
    assert torch.equal(right + told["tied: first use"], _square(own[0]))
    assert torch.equal(right + told["tied: last use"], _square(own[1]))
