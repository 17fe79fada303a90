"""Models, batches and losses of a user's own: one that is right, and one for each way to be wrong."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Two blocks and a head on vectors of 3, or on what ``front`` makes of them."""

    def __init__(self, *front: nn.Module) -> None:
        super().__init__()
        self.front = nn.Sequential(*front)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


class Half(nn.Module):
    """A block that uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.run, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.run(x))


class Skipping(Net):
    """Uses half of its first block, nothing of its second, and nothing of a layer of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0], self.spare = Half(), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks[0](x))
        return result


def skipping() -> nn.Module:
    return Skipping()


class Calls(nn.Module):
    """A function as a layer."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[operator, no-any-return]


class Counts(nn.Module):
    """Keeps a statistic in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


def right() -> nn.Module:
    return Net()


def with_surrogate() -> nn.Module:
    return Net(nn.LayerNorm(3))


def own_layer() -> nn.Module:
    model = Net()
    model.scale = nn.Parameter(torch.ones(3))
    return model


class Scale(nn.Module):
    """A parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Table(nn.Module):
    """Cosines, computed when the model is built."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.arange(1.0, 4.0).double().cos())
        self.register_buffer("mask", torch.ones(3).double())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.cos.to(x.dtype) * self.mask.to(x.dtype)


def tabled() -> nn.Module:
    return Net(Table())


def own_layer_used() -> nn.Module:
    return Net(Scale())


class Named(nn.Module):
    """A block that is called with an input by keyword, as transformers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor, *, beside: Tensor) -> Tensor:
        result: Tensor = torch.relu(self.inner(x)) + beside
        return result


class NamedNet(Net):
    """Its blocks are units that take an input by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Named() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, beside=x)
        result: Tensor = self.head(x)
        return result


def named_inputs() -> nn.Module:
    return NamedNet()


def untaught() -> nn.Module:
    return Net(Calls(torch.atan))


def summed_up() -> nn.Module:
    return Net(nn.Linear(3, 3), Calls(lambda x: x.cumsum(-1)))


def narrow() -> nn.Module:
    return Net(Calls(lambda x: (x.float() * x.float()).to(x.dtype)))


def not_on_none() -> nn.Module:
    return Net(Calls(lambda x: x.reshape(len(x), -1)))


def no_module() -> object:
    return "a model"


def raises() -> nn.Module:
    raise RuntimeError("no such checkpoint")


def random_build() -> nn.Module:
    model = Net()
    nn.init.constant_(model.head.weight, time.perf_counter_ns() % 1e6)
    return model


def batch_norm() -> nn.Module:
    return Net(nn.BatchNorm1d(3))


def dropout() -> nn.Module:
    return Net(nn.Dropout(0.5))


def dropout_off() -> nn.Module:
    return dropout().eval()


def random_forward() -> nn.Module:
    return Net(Calls(torch.nn.functional.dropout))


def divided() -> nn.Module:
    return Net(Calls(lambda x: x / max(1, len(x))))


def crowded() -> nn.Module:
    return Net(Calls(lambda x: 2 * x if len(x) > 5 else x))


def every_third() -> nn.Module:
    return Net(Calls(lambda x: x * (1 + (torch.arange(len(x)) % 3 == 2))[:, None]))


def last_doubled() -> nn.Module:
    return Net(Calls(lambda x: torch.cat([x[:-1], 2 * x[-1:]])))


class Shared(torch.autograd.Function):
    """Gradients are divided by the number of samples, as by a hook that averages."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / max(1, len(grad))


def divided_behind() -> nn.Module:
    return Net(nn.Linear(3, 3), Calls(Shared.apply))


class Recurrent(nn.Module):
    """Sums over many positions, through functions that round, and takes samples apart and together again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.LSTM(3, 40, batch_first=True), nn.LayerNorm(40)
        self.head = nn.Linear(40, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(x[:, None] * torch.linspace(-30, 30, 50)[None, :, None].to(x))
        result: Tensor = self.head(self.norm(states.exp().softmax(1).cumsum(1).mean(1)))
        return result


def recurrent() -> nn.Module:
    return Recurrent()


def mixing() -> nn.Module:
    return Net(Calls(lambda x: x - x.mean(0)))


def counting() -> nn.Module:
    return Net(Counts())


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def complex_parameter() -> nn.Module:
    model = Net()
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


def scalar_parameter() -> nn.Module:
    model = Net()
    model.scale = nn.Parameter(torch.ones(()))
    return model


def reserved_name() -> nn.Module:
    model = Net()
    model.instrument = nn.Linear(1, 1)
    return model


def shared() -> nn.Module:
    model = Net()
    model.blocks[1][0].weight = model.blocks[0][0].weight
    return model


def tuple_output() -> nn.Module:
    return Net(Calls(lambda x: (x, x)))


def batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randn(n, 2)


def classes(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randint(2, (n,))


def no_pair(n: int) -> Tensor:
    return torch.randn(n, 3)


def dictionary(n: int) -> tuple[dict[str, Tensor], Tensor]:
    return {"x": torch.randn(n, 3)}, torch.randn(n, 2)


def few() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3), torch.randn(8, 2)


def transposed(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(3, n), torch.randn(n, 2)


def random_batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.full((n, 3), time.perf_counter_ns() % 1e6), torch.randn(n, 2)


def alike(n: int) -> tuple[Tensor, Tensor]:
    return torch.ones(n, 3), torch.randn(n, 2)


def wide_targets(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randn(n, 5)


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().sum(1)


def averaged(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def shared_out(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1) / len(outputs)


def centred(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - outputs.mean(0) - targets).square().sum(1)


class Rms(nn.Module):
    """The norm of a Llama: computed in float32, whatever comes in, and given back as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * nn.functional.rms_norm(x.float(), (3,)).type_as(x)


class Narrow(nn.Module):
    """A Linear that a model runs in the dtype it names."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = nn.Linear(3, 3), dtype

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.inner.weight.to(self.dtype), self.inner.bias.to(self.dtype)
        return nn.functional.linear(x.to(self.dtype), weight, bias).float()


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = self.inner(x)
        return y.float()


def upcast() -> nn.Module:
    return Net(Rms())


def to_float32() -> nn.Module:
    """The blocks behind it have the dtype that they were given: in float64 plain PyTorch raises."""
    return Net(Calls(lambda x: x.to(torch.bfloat16).float()))


def in_bfloat16() -> nn.Module:
    return Net(Narrow(torch.bfloat16))


def in_float16() -> nn.Module:
    return Net(Narrow(torch.float16))


def autocast() -> nn.Module:
    return Net(Autocast())


def mismatched() -> nn.Module:
    """Runs with a layer in another dtype than the rest, and in no dtype that is all of it."""
    return Net(Calls(Tensor.bfloat16), nn.Linear(3, 3, dtype=torch.bfloat16), Calls(Tensor.float))


def on_two() -> nn.Module:
    """Raises on two samples in the backward alone, whoever runs it."""
    return Net(nn.Linear(3, 3), Calls(Twice.apply))


def on_five() -> nn.Module:
    """Raises on five samples and more."""
    return Net(Calls(_four_at_most))


def _four_at_most(x: Tensor) -> Tensor:
    if len(x) > 4:
        raise ValueError("five at once")
    return x


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        if len(grad) == 2:
            raise ValueError("two at once")
        return grad
