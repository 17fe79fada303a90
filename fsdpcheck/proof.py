"""The bit budget: a proof, before any rank runs, that every sum of a case is exact in every order.

Theorem. If every term of a sum is a multiple of 2**e and the terms' absolute values add up to at most 2**(p+e), then
every partial sum, in every order and blocking, with or without fused multiply-add, is representable in p bits (p = 53
in float64, 24 in float32). So all correct implementations give the same bits.

``prove`` takes the values that really occur (the single device's, at the parameters of each step) and checks the
theorem's premise at each sum of forward, backward, per-sample norms, weighted sums and averaging. The bounds are
themselves computed in float64: a sum of absolute values is exact below 2**53 grid steps, and rounding is monotone, so a
bound that exceeds the budget never looks smaller than it.

Not part of the budget: elementwise stages (norm, factor, optimizer), for which equal bits in give equal bits out; the
values of losses, which no law compares; the global gradient norm, whose law carries its own bound.

Legend: n samples of a step, T positions, d and p features, F flattened body output, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from fsdpcheck import layers, layouts, models
from fsdpcheck.case import Case
from fsdpcheck.errors import NotExact
from fsdpcheck.exact.grid import EMPTY, bits, grid_exponent, premultiplies_exactly
from fsdpcheck.oracle import INSTRUMENT, Answer, StepAnswer

PRECISION = {"float64": 53, "float32": 24}
"""p: bits of the significand by dtype."""


@dataclass
class Budget:
    """Bits used so far, by stage. ``had`` is the precision p.

    ``weights`` [n]: what the loss of each sample is multiplied by in the backward pass that is reduced (clip factor,
    loss scale and W/N), on the grid 2**``weight_exponent``; None where that pass need not be exact.
    """

    had: int
    where: str = "case"
    weights: Tensor | None = None
    weight_exponent: int = 0
    used: dict[str, int] = field(default_factory=dict)

    def spend(self, stage: str, bound: Tensor, exponent: int) -> None:
        """A sum of multiples of 2**exponent whose absolute terms add up to ``bound`` (its largest entry) at most.

        Raises NotExact naming the stage, bits needed and had.
        """
        needed = bits(float(bound.max()) if bound.numel() else 0.0, exponent)
        if needed > self.had:
            raise NotExact(f"{self.where}, {stage}: needs {needed} bits; had {self.had}")
        self.used[stage] = max(self.used.get(stage, 0), needed)

    def spend_backward(self, stage: str, bound_n: Tensor, exponent: int) -> None:
        """The same for a bound [n, ...] by sample, met in the unweighted and in the weighted backward pass."""
        self.spend(f"backward of {stage}", bound_n, exponent)
        if self.weights is not None:
            weighted = bound_n.flatten(1) * self.weights.unsqueeze(-1)
            self.spend(f"weighted backward of {stage}", weighted, exponent + self.weight_exponent)


@dataclass(frozen=True)
class GradientBound:
    """Bound on the absolute terms of each sample's gradient of one parameter, [n, *shape], and the terms' grid."""

    terms: Tensor
    exponent: int

    def __add__(self, other: GradientBound) -> GradientBound:
        return GradientBound(self.terms + other.terms, min(self.exponent, other.exponent))


@dataclass(frozen=True)
class _Visit:
    """One module's pass over all samples of a step: its input, output, and cotangent of the output (loss scale 1)."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor
    cotangent: Tensor
    first: bool


def prove(case: Case, answer: Answer) -> dict[str, int]:
    """The most bits any step uses, by stage. Raises NotExact naming step, stage, bits needed and had.

    Guarantee: if it returns, every sum named in the module's text is exact in every order, in both algebraic forms of
    the norm (direct and Gram). Where clip factors are not dyadic by design ("probe"), and for nested factor rules, it
    covers per-sample gradients and norms but not the weighted sums.
    """
    budget = Budget(PRECISION[case.arithmetic.dtype])
    _averages(case, budget)
    model = models.build(case).double()
    scalar = _loss_scalar(case, budget)
    for k, step in enumerate(answer.steps):
        if not step.samples:
            continue
        budget.where = f"step {k}"
        budget.weights = step.factors.double() * scalar if _reduces_exactly(answer, step) else None
        budget.weight_exponent = grid_exponent(budget.weights) if budget.weights is not None else 0
        bounds = _per_sample(case, step, model, budget)
        if case.step.private:
            _norms(case, bounds, budget)
        if budget.weights is not None:
            _weighted_sums(case, step, bounds, budget)
    return budget.used


def _reduces_exactly(answer: Answer, step: StepAnswer) -> bool:
    """Whether the sums over weighted samples are promised to be exact."""
    if answer.case.step.clipping == "probe":
        return False
    return not answer.rule.nested or not bool((step.factors != 1).any())


def _loss_scalar(case: Case, budget: Budget) -> float:
    """What a sample's loss is multiplied by besides its factor: the loss scale times W/N (1/N when replicated)."""
    replicated = case.layout.kind == "replicated"
    share = Fraction(1 if replicated else case.world_size, case.step.normaliser)
    if share.denominator & (share.denominator - 1):
        raise NotExact(f"{budget.where}, normaliser: losses times {share}, which is no dyadic number")
    scalar = models.loss_scale(case) * float(share)
    budget.spend("loss scale", torch.tensor(scalar), grid_exponent(torch.tensor(scalar)))
    return scalar


def _averages(case: Case, budget: Budget) -> None:
    """Gradients are multiples of every axis's size; premultiplied by fl(1/size) they must still be exact."""
    mesh = case.mesh
    if case.arithmetic.averaging == "premultiply":
        for size in (mesh.dp_shard, mesh.dp_replicate, case.world_size):
            if not premultiplies_exactly(size, budget.had):
                raise NotExact(f"{budget.where}, averaging: multiples of {size} times the rounded 1/{size} round again")


def _per_sample(case: Case, step: StepAnswer, model: models.CaseModel, budget: Budget) -> dict[str, GradientBound]:
    """Spend forward and backward of all samples of the step; give each trainable parameter's bound, loss scale 1."""
    bounds: dict[str, GradientBound] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for visit in _visits(case, step, model, budget):
        for parameter, bound in _backward(visit, budget):
            if parameter.requires_grad:
                name = names[id(parameter)]
                bounds[name] = bounds[name] + bound if name in bounds else bound
    for name, bound in bounds.items():
        budget.spend_backward(name, bound.terms, bound.exponent)
    bounds[INSTRUMENT] = GradientBound(step.targets.abs().unsqueeze(-1), grid_exponent(step.targets))
    return bounds


def _visits(case: Case, step: StepAnswer, model: models.CaseModel, budget: Budget) -> list[_Visit]:
    """Run the body on all samples at once, layer by layer, and its backward from the unscaled losses."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(step.before[name])
    hidden = layouts.inputs(case)[list(step.samples)]
    hidden = hidden.double() if hidden.is_floating_point() else hidden
    passes: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    for name, module in model.named_modules():
        if name.startswith(("units.", "tail.")) and not isinstance(module, nn.Sequential):
            output = module(hidden)
            _forward(name, module, hidden, output, budget)
            passes.append((name, module, hidden.detach(), output))
            hidden = output if output.requires_grad else output.requires_grad_()
    losses = _losses(case, step, hidden.flatten(1), budget)
    cotangents = torch.autograd.grad(losses.sum(), [output for *_, output in passes])
    return [
        _Visit(name, module, before, output.detach(), cotangent, first=place == 0)
        for place, ((name, module, before, output), cotangent) in enumerate(zip(passes, cotangents, strict=True))
    ]


def _losses(case: Case, step: StepAnswer, body_nF: Tensor, budget: Budget) -> Tensor:
    """Unscaled losses [n] with a silent instrument; spends the residual y - t, or the margin 1 - y sign(t)."""
    silent = torch.zeros_like(step.targets)
    targets_nF = layouts.targets(case)[list(step.samples)].double()
    exponent = min(grid_exponent(body_nF), grid_exponent(targets_nF), 0)
    budget.spend("loss", body_nF.detach().abs() + targets_nF.abs() + 1, exponent)
    loss = models.PerSampleLoss(case.step.loss, models.body_features(case), classes=models.classes(case))
    losses: Tensor = loss(torch.cat([body_nF, silent], 1), torch.cat([targets_nF, silent], 1))
    return losses


def _forward(name: str, module: nn.Module, x: Tensor, output: Tensor, budget: Budget) -> None:
    """Spend one layer's forward. Raises NotExact for a layer without a rule."""
    stage = f"forward of {name}"
    if isinstance(module, nn.Linear):
        weight = module.weight.detach()
        bound, exponent = x.detach().abs() @ weight.abs().T, grid_exponent(x) + grid_exponent(weight)
        if module.bias is not None:
            bound, exponent = bound + module.bias.detach().abs(), min(exponent, grid_exponent(module.bias))
        budget.spend(stage, bound, exponent)
    elif isinstance(module, nn.LayerNorm):
        _layer_norm(stage, module, x, budget)
    elif isinstance(module, (nn.Embedding, nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.Identity, layers.Abs)):
        budget.spend(stage, output.detach().abs(), grid_exponent(output))
    else:
        raise NotExact(f"{budget.where}, {stage}: no rule for a {type(module).__name__}")


def _backward(visit: _Visit, budget: Budget) -> Iterator[tuple[Tensor, GradientBound]]:
    """Spend one layer's backward; yield (parameter, bound of its per-sample gradient)."""
    if isinstance(visit.module, nn.Linear):
        yield from _linear(visit, visit.module, budget)
    elif isinstance(visit.module, nn.Embedding):
        yield visit.module.weight, _embedding_bound(visit, visit.module)
    elif isinstance(visit.module, nn.LayerNorm):
        summed = GradientBound(_positions(visit.cotangent).abs().sum(1), grid_exponent(visit.cotangent))
        yield visit.module.weight, summed  # normalised inputs are +-1
        yield visit.module.bias, summed
    else:
        budget.spend_backward(visit.name, visit.cotangent.abs(), grid_exponent(visit.cotangent))


def _linear(visit: _Visit, module: nn.Linear, budget: Budget) -> Iterator[tuple[Tensor, GradientBound]]:
    x_nTd, g_nTp = _positions(visit.input), _positions(visit.cotangent)
    if not visit.first:
        weight_pd = module.weight.detach()
        backward = g_nTp.abs() @ weight_pd.abs()
        budget.spend_backward(visit.name, backward, grid_exponent(g_nTp) + grid_exponent(weight_pd))
    yield module.weight, GradientBound(g_nTp.abs().mT @ x_nTd.abs(), grid_exponent(g_nTp) + grid_exponent(x_nTd))
    if module.bias is not None:
        yield module.bias, GradientBound(g_nTp.abs().sum(1), grid_exponent(g_nTp))


def _embedding_bound(visit: _Visit, module: nn.Embedding) -> GradientBound:
    """Rows of one token add up; the padding row gets nothing."""
    one_hot_nTV = nn.functional.one_hot(visit.input, module.num_embeddings).double()
    if module.padding_idx is not None:
        one_hot_nTV[..., module.padding_idx] = 0
    return GradientBound(one_hot_nTV.mT @ visit.cotangent.abs(), grid_exponent(visit.cotangent))


def _layer_norm(stage: str, module: nn.LayerNorm, x: Tensor, budget: Budget) -> None:
    """LayerNorm divides and takes roots: what its kernel really gives must be +-1, in float64 and the case's dtype."""
    for dtype in {torch.float64, torch.float32 if budget.had == PRECISION["float32"] else torch.float64}:
        if not _normalises_to_signs(x, module, dtype):
            raise NotExact(f"{budget.where}, {stage}: its {dtype} kernel leaves the grid of +-1")
    weight, bias = module.weight.detach(), module.bias.detach()
    budget.spend(stage, weight.abs() + bias.abs(), min(grid_exponent(weight), grid_exponent(bias)))


def _normalises_to_signs(inputs: Tensor, module: nn.LayerNorm, dtype: torch.dtype) -> bool:
    """Whether the kernel computes mean 0, a power of two for 1/std, and +-1 before weight and bias."""
    shape = list(module.normalized_shape)
    output, mean, rstd = torch.native_layer_norm(inputs.to(dtype), shape, None, None, module.eps)
    return bool((mean == 0).all() and (rstd.frexp().mantissa == 0.5).all() and (output.abs() == 1).all())


def _positions(tensor: Tensor) -> Tensor:
    """[n, d] or [n, T, d] as [n, T, d]."""
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor


def _norms(case: Case, bounds: dict[str, GradientBound], budget: Budget) -> None:
    """Squared norms, scaled, over all parameters.

    With H the bound of a weight's gradient, |H|_F^2 bounds the direct sum of squares and also every sum of the Gram
    form <A A^T, G G^T>: its terms' absolute values add up to ||G|^T |A||_F^2, and an entry of A A^T or G G^T that is
    not multiplied by zero is at most that over the other factor's grid step. The cross terms of a weight used twice are
    covered too: H adds both uses up before squaring.
    """
    scale = models.loss_scale(case)
    total = torch.stack([bound.terms.flatten(1).square().sum(1) for bound in bounds.values()]).sum(0)
    exponent = min(2 * bound.exponent for bound in bounds.values())
    budget.spend("squared norms", total * scale**2, exponent + 2 * grid_exponent(torch.tensor(scale)))


def _weighted_sums(case: Case, step: StepAnswer, bounds: dict[str, GradientBound], budget: Budget) -> None:
    """Sums of weighted gradients over samples, micro-batches and ranks; a replicated batch comes from all W ranks.

    Averaging then divides by W what the loss scale made a multiple of W.
    """
    assert budget.weights is not None
    copies = case.world_size if case.layout.kind == "replicated" else 1
    weights = budget.weights * torch.tensor(step.multiplicity, dtype=torch.float64) * copies
    for name, bound in bounds.items():
        terms = torch.tensordot(weights, bound.terms, dims=1)
        budget.spend(f"weighted sum of {name}", terms, bound.exponent + budget.weight_exponent)


def absolute_gradients(case: Case, step: StepAnswer) -> dict[str, Tensor]:
    """Per-sample gradients [n, *shape] with every path's absolute value added up, loss scale 1, trainable only.

    The backward pass of |weights| on |cotangents|: what rounding errors committed anywhere in a weighted backward pass
    are relative to. Frozen parameters are passed through but not listed.
    """
    free = Budget(had=EMPTY)
    model = models.build(case).double()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    cotangent: Tensor | None = None
    for visit in reversed(_visits(case, step, model, free)):
        cotangent = visit.cotangent.abs() if cotangent is None else cotangent
        for parameter, bound in _backward(replace(visit, cotangent=cotangent), free):
            if parameter.requires_grad:
                name = names[id(parameter)]
                found[name] = found[name] + bound.terms if name in found else bound.terms
        if not visit.first:
            cotangent = _absolute_backward(visit, cotangent)
    found[INSTRUMENT] = step.targets.abs().unsqueeze(-1)
    return found


def _absolute_backward(visit: _Visit, cotangent: Tensor) -> Tensor:
    """Bound on the cotangent of a module's input, given one on the cotangent of its output."""
    if isinstance(visit.module, nn.Linear):
        return cotangent @ visit.module.weight.detach().abs()
    source = visit.input.clone().requires_grad_()
    slope: Tensor = torch.autograd.grad(visit.module(source).sum(), source)[0]
    return cotangent * slope.abs()
