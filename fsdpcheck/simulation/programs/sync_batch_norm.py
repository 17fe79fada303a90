"""``SyncBatchNorm`` on the CPU: torch's own forward and backward, over the five kernels that only GPUs have.

So it communicates as on a GPU. Formulas: Ioffe and Szegedy, 2015, with the moments of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, library

from fsdpcheck.compat import cuda_private, torch_private


@contextmanager
def in_place(note: Callable[[str], None]) -> Iterator[None]:
    """While open, it takes tensors on the CPU."""
    kernels = library.Library("aten", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    for kernel in (_stats, _gather_stats_with_counts, _elemt, _backward_reduce, _backward_elemt):
        kernels.impl(f"batch_norm{kernel.__name__}", kernel)  # type: ignore[no-untyped-call]
    alone: Any = torch.nn.modules.batchnorm.BatchNorm2d.forward

    def forward(module: Any, tensor: Tensor) -> Tensor:
        group = module.process_group or (dist.group.WORLD if dist.is_initialized() else None)
        if not module.training or group is None or dist.get_world_size(group) == 1:
            return torch.as_tensor(alone(module, tensor))
        note("SyncBatchNorm")
        return _together(module, tensor, group)

    try:
        with torch_private.replaced(torch.nn.SyncBatchNorm, forward=forward):
            yield
    finally:
        torch_private.remove_kernels(kernels)


def _together(module: Any, tensor: Tensor, group: Any) -> Tensor:
    module._check_input_dim(tensor)
    module._check_non_zero_input_channels(tensor)
    tracked, momentum = module.track_running_stats, module.momentum or 0.0
    if tracked:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            momentum = 1.0 / module.num_batches_tracked.item()
    running = (module.running_mean, module.running_var) if tracked else (None, None)
    size = dist.get_world_size(group)
    return cuda_private.sync_batch_norm(tensor, module.weight, module.bias, *running, module.eps, momentum, group, size)


def _dims(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _per_channel(value: Tensor, tensor: Tensor) -> Tensor:
    return value.view(1, -1, *[1] * (tensor.dim() - 2))


def _stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of each channel, of the samples of one rank."""
    var, mean = torch.var_mean(input.float(), dim=_dims(input), correction=0)
    return mean, torch.rsqrt(var + eps)


def _gather_stats_with_counts(
    input: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same of all ranks, from those of each."""
    share, total = (counts / counts.sum()).view(-1, 1), counts.sum()
    mean = (share * means).sum(0)
    var = (share * (invstds**-2 - eps + (means - mean) ** 2)).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * total / (total - 1)).to(running_var.dtype), momentum)
    return mean, torch.rsqrt(var + eps)


def _elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    scale = invstd if weight is None else invstd * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return (input * _per_channel(scale, input) + _per_channel(shift, input)).to(input.dtype)


def _backward_reduce(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, dims = grad_out.float(), _dims(input)
    sum_dy = grad.sum(dims)
    sum_dy_xmu = (grad * (input - _per_channel(mean, input))).sum(dims)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()


def _backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum()
    scale = invstd if weight is None else invstd * weight
    slope = _per_channel(invstd**2 * sum_dy_xmu / total, input)
    centred = grad_out - _per_channel(sum_dy / total, input) - (input - _per_channel(mean, input)) * slope
    return (centred * _per_channel(scale, input)).to(input.dtype)
