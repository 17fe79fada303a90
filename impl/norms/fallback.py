"""Any layer without a rule: per-sample gradients by torch.func, from the layer alone.

The layer's forward is run again, one sample at a time under ``vmap``, from its activations, and its backprop is pulled
back to the parameters that the layer itself holds (children have rules of their own). That takes the values of the
parameters, so it must happen while they are gathered, and B times their memory. Used only if no rule's type is exactly
the layer's; slower than a rule, and as general as the layer is honest: its output must be a tensor, or a tuple whose
first item is one, and row i of it a function of row i of the inputs alone.

Refused: layers that mix samples (known types, and ``mixes_samples`` finds others), layers that are random in training
mode (the second run would draw other numbers), tensors passed by keyword (nobody knows which axis is the samples').

Source: ``torch.func``; Opacus' functorch grad sampler does the same, https://github.com/meta-pytorch/opacus/pull/755.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from . import _terms

LAYER = ()
NEEDS_PARAMETERS = True


@dataclass(frozen=True)
class Call:
    """What a layer was called with. Tensors have B rows, but for keywords named in ``shared``; the rest is constant.

    ``output`` [B, ...]: what it gave, if that is to be compared with what it gives when it is run again. ``autocast``:
    the dtype that autocast computed in then, None where it was off.
    """

    positional: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    shared: Collection[str] = ()
    output: Tensor | None = None
    autocast: torch.dtype | None = None

    def rows(self) -> list[Tensor]:
        """The tensors that have a row a sample, in order."""
        values = [*self.positional, *(value for name, value in self.keywords.items() if name not in self.shared)]
        return [value for value in values if isinstance(value, Tensor)]

    def precision(self) -> torch.autocast:
        """Autocast as it was when the layer was called: a backward may lie outside of it."""
        device = self.rows()[0].device.type if self.rows() else "cpu"
        return torch.autocast(device, self.autocast, enabled=self.autocast is not None, cache_enabled=False)

    def given(self, rows: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keyword arguments with ``rows`` in place of ``self.rows()``."""
        left = iter(rows)
        positional = tuple(next(left) if isinstance(value, Tensor) else value for value in self.positional)
        own = {name: isinstance(value, Tensor) and name not in self.shared for name, value in self.keywords.items()}
        return positional, {name: next(left) if own[name] else value for name, value in self.keywords.items()}


def refusal(module: nn.Module) -> str:
    """Layers whose samples' gradients cannot be found by running them again."""
    for name, child in module.named_modules():
        where = f" ({name} is a {type(child).__name__})" if name else ""
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            return f"it mixes the samples of a batch{where}: use GroupNorm or LayerNorm"
        if child.training and any(getattr(child, option, 0) for option in _randomness(child)):
            return f"it is random in training mode{where} and has no norm rule: set its dropout to 0, or write a rule"
    return ""


def squared_norm(module: nn.Module, activations: Tensor | Call, backprops: Tensor) -> Tensor:
    """[B]: squared gradient norms over the trainable parameters that the layer itself holds."""
    return _terms.squares(per_sample_gradient(module, activations, backprops), backprops)


def per_sample_gradient(module: nn.Module, activations: Tensor | Call, backprops: Tensor) -> dict[str, Tensor]:
    """{attribute: [B, *shape]} of the trainable parameters that the layer itself holds."""
    return gradients_of(module, _own(module), activations, backprops)


def weighted_gradient(
    module: nn.Module, activations: Tensor | Call, backprops: Tensor, weights_B: Tensor
) -> dict[str, Tensor]:
    """{attribute: [*shape]}: one pull-back of the whole batch; no per-sample gradient is formed."""
    return weighted_gradients_of(module, _own(module), activations, backprops, weights_B)


def gradients_of(
    module: nn.Module, names: Sequence[str], activations: Tensor | Call, backprops: Tensor
) -> dict[str, Tensor]:
    """{name: [B, *shape]} of the parameters of these (dotted) names below ``module``.

    Raises NotImplementedError if torch.func cannot run the layer, which a layer that draws random numbers is one of.
    """
    values = {name: module.get_parameter(name).detach() for name in names}
    if not values or not len(backprops):
        return {name: value.new_zeros(len(backprops), *value.shape) for name, value in values.items()}
    call = as_call(activations)

    def of_one_sample(backprop: Tensor, *rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return _pulled_back(module, call, values, [row.unsqueeze(0) for row in rows], backprop.unsqueeze(0))

    try:
        found, again_B1 = _of_each(of_one_sample, backprops, *call.rows())
    except RuntimeError as error:
        kind = type(module).__name__.removeprefix("FSDP")
        raise NotImplementedError(
            f"a {kind} has no norm rule, and torch.func cannot take its per-sample gradients: {error};"
            " a layer that is random in training mode needs its dropout at 0, any other a rule in impl/norms"
        ) from error
    if call.output is not None and not _same(call.output, again_B1.squeeze(1), call.autocast):
        raise NotImplementedError(
            f"a {type(module).__name__.removeprefix('FSDP')} has no norm rule, and gave another output when it was run"
            " again for its per-sample gradients: let it be a function of its inputs, parameters and buffers alone,"
            " without counters, inputs changed in place, or random numbers (a layer that is random"
            " in training mode needs its dropout at 0)"
        )
    return found


def _of_each(
    of_one: Callable[..., tuple[dict[str, Tensor], Tensor]], *rows: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and outputs of all samples: at once, or one by one where ``vmap`` cannot (nn.GRU, in torch 2.13)."""
    found: dict[str, Tensor]
    try:
        found, outputs = vmap(of_one, randomness="error")(*rows)
    except RuntimeError:
        each = [of_one(*row) for row in zip(*rows, strict=True)]
        found = {name: torch.stack([gradients[name] for gradients, _ in each]) for name in each[0][0]}
        outputs = torch.stack([output for _, output in each])
    return found, outputs


def weighted_gradients_of(
    module: nn.Module, names: Sequence[str], activations: Tensor | Call, backprops: Tensor, weights_B: Tensor
) -> dict[str, Tensor]:
    """{name: [*shape]} of the parameters of these (dotted) names below ``module``."""
    values = {name: module.get_parameter(name).detach() for name in names}
    if not values or not len(backprops):
        return {name: torch.zeros_like(value) for name, value in values.items()}
    call = as_call(activations)
    return _pulled_back(module, call, values, call.rows(), _terms.scaled(backprops, weights_B))[0]


def mixes_samples(module: nn.Module, activations: Tensor | Call) -> bool:
    """Whether a NaN in sample 0 of a made-up batch of two reaches the output of sample 1. Needs the parameters.

    The batch has the shapes of ``activations`` and no values of theirs, so every rank finds the same, also one that has
    no rows. Layers whose inputs are all integers cannot be asked this way: False.
    """
    call = as_call(activations)
    clean = [made_up(rows, 2) for rows in call.rows()]
    poisoned = [rows.index_fill(0, rows.new_zeros(1, dtype=torch.int64), _poison(rows)) for rows in clean]
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.no_grad():
        one = _run(module, call, {**buffers}, clean)
        other = _run(module, call, {name: buffer.clone() for name, buffer in buffers.items()}, poisoned)
    return not torch.equal(one[1].isnan(), other[1].isnan())


def made_up(rows: Tensor, count: int) -> Tensor:
    """[count, ...]: equal rows shaped like those of ``rows``: 1, 2, 3, ... over their number, or zeros for integers."""
    shape = rows.shape[1:]
    if not rows.is_floating_point():
        return rows.new_zeros((count, *shape))
    numbers = shape.numel()
    row = torch.arange(1, numbers + 1, dtype=torch.float64, device=rows.device).div(max(numbers, 1)).to(rows.dtype)
    return row.reshape(shape).expand(count, *shape).clone()


def as_call(activations: Tensor | Call) -> Call:
    """A single input as a call."""
    return Call((activations,)) if isinstance(activations, Tensor) else activations


def main_output(output: Any) -> Any:
    """The output that backprops belong to: the first item of a tuple or a list, any other output itself."""
    return output[0] if isinstance(output, (tuple, list)) and output else output


class _Bare(nn.Module):
    """A layer's forward without the layer's own hooks, which record, gather and free."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *positional: Any, **keywords: Any) -> Any:
        return main_output(self.module.forward(*positional, **keywords))


def _pulled_back(
    module: nn.Module, call: Call, values: dict[str, Tensor], rows: Sequence[Tensor], backprops: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients by name, and the output that they are of."""
    output, pull, *_ = vjp(lambda parameters: _run(module, call, parameters, rows), values)
    found: dict[str, Tensor] = pull(backprops)[0]
    return found, output


def _same(one: Tensor, other: Tensor, computed_in: torch.dtype | None) -> bool:
    """Whether two outputs agree to half of the digits of the coarsest dtype: sums in another order agree to more."""
    if one.shape != other.shape:
        return False
    near = max(torch.finfo(dtype).eps for dtype in (one.dtype, other.dtype, computed_in or one.dtype)) ** 0.5
    finite = one.isfinite() & other.isfinite()
    one, other = one.masked_fill(~finite, 0), other.masked_fill(~finite, 0)
    return bool(((one - other).abs().amax() <= near * one.abs().amax()).item()) if one.numel() else True


def _run(module: nn.Module, call: Call, values: Mapping[str, Tensor], rows: Sequence[Tensor]) -> Tensor:
    positional, keywords = call.given(rows)
    named = {f"module.{name}": value for name, value in values.items()}
    with call.precision():
        output: Tensor = functional_call(_Bare(module), named, positional, keywords)
    return output


def _own(module: nn.Module) -> list[str]:
    return [name for name, value in module.named_parameters(recurse=False) if value.requires_grad]


def _randomness(module: nn.Module) -> Sequence[str]:
    """Options of known layers that make them random where they are not zero."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return ("p",)
    return ("dropout",) if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) else ()


def _poison(rows: Tensor) -> float:
    return float("nan") if rows.is_floating_point() else 0
