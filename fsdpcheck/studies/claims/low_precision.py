"""A tensor that travels in low precision: the pre and post all-gather extensions of FSDP2 on a tensor subclass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Halved(Tensor):
    """A float64 tensor that travels as float32; every other operator sees the tensor inside."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, strides=data.stride())

    def __init__(self, data: Tensor) -> None:
        self.data_ = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Halved:
        return Halved(inner["data_"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        unwrap = lambda value: value.data_ if isinstance(value, cls) else value  # noqa: E731
        plain = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            func(*plain[0], **plain[1])
            return args[0]
        result = func(*plain[0], **plain[1])
        kept = func.namespace == "aten" and func.overloadpacket.__name__ in _KEPT
        return torch.utils._pytree.tree_map(
            lambda value: cls(value) if kept and isinstance(value, Tensor) else value, result
        )

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self.data_.float(),), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: Any, *, out: Tensor | None = None
    ) -> Any:
        (gathered,) = all_gather_outputs
        if out is not None:
            out.copy_(gathered)
            return None
        return gathered.double(), (gathered,)


_KEPT = frozenset(
    [
        "detach",
        "clone",
        "split",
        "slice",
        "view",
        "as_strided",
        "new_zeros",
        "empty_like",
        "zeros_like",
        "_to_copy",
        "chunk",
        "narrow",
    ]
)
