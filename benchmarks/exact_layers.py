"""Which layers and functions of torch a user's model may have, and be judged exactly: ``python -m benchmarks layers``.

Each is put between two Linear layers, on inputs of four numbers. It is exact if three cases of one sample to three are
proved so. ``docs/user-models.md`` has what comes of it, and a nightly test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WIDTH: Final = 4
_CLASSES: Final = 3
DOCUMENT: Final = Path(__file__).parent.parent / "docs" / "user-models.md"


@dataclass(frozen=True)
class Layer:
    """``make``: the layer, None for a function. ``call(layer, x)`` gives [n, ``width``] of [n, 4]."""

    make: Callable[[], nn.Module] | None
    call: Callable[[Any, Tensor], Tensor] = lambda layer, x: layer(x)
    width: int = _WIDTH


def _line(make: Callable[[], nn.Module], width: int) -> Layer:
    """Over one channel of four positions."""
    return Layer(make, lambda layer, x: layer(x.unsqueeze(1)).flatten(1), width)


def _square(make: Callable[[], nn.Module], width: int) -> Layer:
    """Over one channel of two by two."""
    return Layer(make, lambda layer, x: layer(x.view(-1, 1, 2, 2)).flatten(1), width)


def _of(function: Callable[[Tensor], Tensor]) -> Layer:
    return Layer(None, lambda _, x: function(x))


def _recurrent(kind: type[nn.RNNBase]) -> Layer:
    return Layer(lambda: kind(_WIDTH, _WIDTH, batch_first=True), lambda layer, x: layer(x.unsqueeze(1))[0].squeeze(1))


def _attention(mask: str) -> Layer:
    def call(layer: Any, x: Tensor) -> Tensor:
        rows = x.view(-1, 2, 2)
        given = torch.ones(2, 2, dtype=torch.bool, device=x.device).triu(1) if mask else None
        return layer(rows, rows, rows, attn_mask=given, need_weights=False)[0].flatten(1)  # type: ignore[no-any-return]

    return Layer(lambda: nn.MultiheadAttention(2, 1, batch_first=True), call)


_ACTIVATIONS: Final = (
    *("ReLU", "ReLU6", "GELU", "SiLU", "Tanh", "Sigmoid", "Softplus", "ELU", "SELU", "CELU", "Mish", "Hardswish"),
    *("Hardsigmoid", "Hardtanh", "LeakyReLU", "PReLU", "LogSigmoid", "Softsign", "Tanhshrink", "Softshrink"),
    *("Hardshrink",),
)
LAYERS: Final[dict[str, Layer]] = {
    **{name: Layer(getattr(nn, name)) for name in _ACTIVATIONS},
    "Softmax": Layer(lambda: nn.Softmax(-1)),
    "LogSoftmax": Layer(lambda: nn.LogSoftmax(-1)),
    "GLU": Layer(lambda: nn.GLU(-1), width=2),
    "LayerNorm": Layer(lambda: nn.LayerNorm(_WIDTH)),
    "RMSNorm": Layer(lambda: nn.RMSNorm(_WIDTH)),
    "GroupNorm": Layer(lambda: nn.GroupNorm(2, _WIDTH)),
    "InstanceNorm1d": _line(lambda: nn.InstanceNorm1d(1), 4),
    "Bilinear": Layer(lambda: nn.Bilinear(_WIDTH, _WIDTH, _WIDTH), lambda layer, x: layer(x, x)),
    "GRU": _recurrent(nn.GRU),
    "LSTM": _recurrent(nn.LSTM),
    "RNN": _recurrent(nn.RNN),
    "GRUCell": Layer(lambda: nn.GRUCell(_WIDTH, _WIDTH)),
    "LSTMCell": Layer(lambda: nn.LSTMCell(_WIDTH, _WIDTH), lambda layer, x: layer(x)[0]),
    "MultiheadAttention": _attention(""),
    "MultiheadAttention with a mask of booleans": _attention("boolean"),
    "Conv1d": _line(lambda: nn.Conv1d(1, 2, 3, padding=1), 8),
    "Conv2d": _square(lambda: nn.Conv2d(1, 2, 2, stride=2), 2),
    "ConvTranspose1d": _line(lambda: nn.ConvTranspose1d(1, 2, 3, padding=1), 8),
    "MaxPool1d": _line(lambda: nn.MaxPool1d(2), 2),
    "MaxPool2d": _square(lambda: nn.MaxPool2d(2), 1),
    "AvgPool1d": _line(lambda: nn.AvgPool1d(2), 2),
    "AvgPool2d": _square(lambda: nn.AvgPool2d(2), 1),
    "AdaptiveAvgPool2d": _square(lambda: nn.AdaptiveAvgPool2d(1), 1),
    "AdaptiveMaxPool1d": _line(lambda: nn.AdaptiveMaxPool1d(2), 2),
    "Upsample": _line(lambda: nn.Upsample(scale_factor=2), 8),
    "Upsample, linear": _line(lambda: nn.Upsample(scale_factor=2, mode="linear"), 8),
    "PixelShuffle": Layer(lambda: nn.PixelShuffle(2), lambda layer, x: layer(x.view(-1, 4, 1, 1)).flatten(1)),
    "Unfold": _square(lambda: nn.Unfold(2), 4),
    "CosineSimilarity": Layer(lambda: nn.CosineSimilarity(-1), lambda layer, x: layer(x, x.flip(-1)).unsqueeze(-1), 1),
    "einsum": _of(lambda x: torch.einsum("bi,bj->bij", x, x).sum(-1)),
    "topk": _of(lambda x: x.topk(_WIDTH, -1).values),
    "sort": _of(lambda x: x.sort(-1).values),
    "cumsum": _of(lambda x: x.cumsum(-1)),
    "roll": _of(lambda x: x.roll(1, -1)),
    "scatter": _of(lambda x: torch.zeros_like(x).scatter(-1, torch.arange(3, -1, -1).expand_as(x), x)),
    "where": _of(lambda x: torch.where(x > 0, x, -x)),
    "pow 2": _of(lambda x: x**2),
    "rsqrt": _of(lambda x: (x * x + 1).rsqrt()),
    "sin": _of(torch.sin),
    "exp": _of(torch.exp),
    "log": _of(lambda x: (x.abs() + 1).log()),
    "logsumexp": _of(lambda x: x.logsumexp(-1, keepdim=True).expand(-1, _WIDTH)),
    "erf": _of(torch.erf),
    "reciprocal": _of(lambda x: (x * x + 1).reciprocal()),
    "division by 3": _of(lambda x: x / 3),
    "var": _of(lambda x: x.var(-1, keepdim=True).expand(-1, _WIDTH)),
    "norm": _of(lambda x: x.norm(dim=-1, keepdim=True).expand(-1, _WIDTH)),
    "F.normalize": _of(lambda x: F.normalize(x, dim=-1)),
    "cdist": _of(lambda x: torch.cdist(x.unsqueeze(1), x.unsqueeze(1) + 1).squeeze(1).expand(-1, _WIDTH)),
    "fft": _of(lambda x: torch.fft.fft(x).real),
}


class _Between(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.below, self.call = nn.Linear(_WIDTH, _WIDTH), layer.call
        self.layer = nn.Identity() if layer.make is None else layer.make()
        self.head = nn.Linear(layer.width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.layer, self.below(x)))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """[n, 4] numbers and [n] classes."""
    return torch.randn(rows, _WIDTH), torch.randint(0, _CLASSES, (rows,))


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """``build_N``: builds the model of the N-th layer."""
    number = name.removeprefix("build_")
    if not (name.startswith("build_") and number.isdecimal()):
        raise AttributeError(name)
    return lambda: _Between([*LAYERS.values()][int(number)])


def why_not(name: str) -> str:
    """Why a model with this layer has no exact cases, in words; "" where it has."""
    from fsdpcheck import oracle
    from fsdpcheck.case import BatchLayout, ModelSpec, StepSpec, TrainingCase
    from fsdpcheck.errors import FsdpcheckError
    from fsdpcheck.oracle import certificate
    from fsdpcheck.workload.user_model import inspection

    try:
        seen = inspection.inspect(f"{__file__}:build_{[*LAYERS].index(name)}", f"{__file__}:batch")
        for rows in (1, 2, 3):
            layout = BatchLayout("contiguous", rows)
            case = TrainingCase(ModelSpec((), own=seen.own), layout=layout, step=StepSpec("cross_entropy"))
            certificate.prove(case, oracle.answer(case))
    except FsdpcheckError as error:
        return str(error).partition("\n")[0]
    return ""


def lines() -> Iterator[str]:
    """A line a layer, then what the document says."""
    exact: list[str] = []
    others: list[str] = []
    for name in LAYERS:
        why = why_not(name)
        (others if why else exact).append(name)
        yield f"{name}: {why or 'exact'}"
    yield document(exact, others)


def document(exact: list[str], others: list[str]) -> str:
    """As docs/user-models.md has it."""
    return (
        f"Of {len(LAYERS)} layers and functions that were tried, {len(exact)} are judged exactly: {', '.join(exact)}."
        f" Models with the others have `--real`: {', '.join(others)}."
    )
