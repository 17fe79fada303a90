"""FlatBuffer: parameters laid end to end in one 1-D buffer, of which each rank keeps one shard.

n = elements of all parameters, W = ranks, s = ceil(n / W) = elements of a shard, the same on every rank::

    parameters   |--- weight ---|- bias -|
    full [W*s]   |--- weight ---|- bias -|00|      n=10, W=3: s=4, shards 4 + 4 + 2, and 2 elements of padding
    shards [s]   | rank 0  | rank 1  | rank 2 |

Guarantees. Padding is zero after construction, after a gradient has been reduced (gradients are packed into zeros) and
after any optimizer that maps (value 0, gradient 0) to 0; it is never read: parameters are views of the first n
elements. When n < W, whole shards are padding. With one rank the shard *is* the full buffer, not a copy.

Source: FlatParameter of FSDP, Zhao et al. 2023, arXiv:2304.11277, section 3.2; ZeRO, Rajbhandari et al. 2019,
arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .collectives import Axis
from .protocol import Piece
from .spans import Span


class FlatBuffer:
    """One rank's side of a sharded buffer of ``named`` parameters (at least one; one dtype, one device).

    ``shard`` [s] is what persists and, if ``trainable``, what the optimizer updates. ``full`` [W*s] holds memory only
    while allocated. The parameters stay the same objects for ever: allocated, each views its piece of ``full``; freed,
    each is an empty tensor, because reading a view of a freed storage would crash the process.

    ``computing``: the objects that the model computes with, in another dtype than ``named``; by default ``named`` are.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        axis: Axis,
        trainable: bool,
        computing: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.names = list(named)
        self.parameters = list(named.values() if computing is None else computing)
        _check_uniform(named)
        self.axis = axis
        self.trainable = trainable
        self.shapes = [parameter.shape for parameter in named.values()]
        self.sizes = [parameter.numel() for parameter in named.values()]
        self.numel = sum(self.sizes)
        self.shard_numel = -(-self.numel // axis.size)
        self.dtype = next(iter(named.values())).dtype
        whole = self.pack([parameter.detach() for parameter in named.values()])
        self.full = whole if computing is None else whole.to(self.parameters[0].dtype)
        self.is_shard = axis.size == 1 and computing is None
        """Whether ``full`` is the shard itself: nothing is gathered or freed."""
        self._pieces, self._nothing = self.views(self.full), self.full.new_empty(0)
        shard = whole if axis.size == 1 else whole[self.start : self.start + self.shard_numel].clone()
        self.shard = nn.Parameter(shard, requires_grad=trainable)
        self._added: list[Tensor | None] = [None] * len(self.names)
        self.attach()

    @property
    def start(self) -> int:
        """Position in the full buffer of this rank's first element."""
        return self.axis.rank * self.shard_numel

    @property
    def real(self) -> int:
        """How many elements of this rank's shard are parameters: the first ``real`` ones. 0 if it is all padding."""
        return min(max(self.numel - self.start, 0), self.shard_numel)

    @property
    def padding(self) -> slice:
        """The slice of a shard that is padding; empty on most ranks."""
        return slice(self.real, self.shard_numel)

    def pack(self, pieces: Sequence[Tensor | None]) -> Tensor:
        """A new buffer [W*s] in the shard's dtype, one piece a parameter; a missing piece and the padding are zero."""
        first, dtype = self.parameters[0], self.dtype
        flats = [
            first.new_zeros(size, dtype=dtype) if piece is None else piece.reshape(-1).to(dtype)
            for size, piece in zip(self.sizes, pieces, strict=True)
        ]
        return torch.cat([*flats, first.new_zeros(self.shard_numel * self.axis.size - self.numel, dtype=dtype)])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat`` [W*s], one a parameter, in the parameter's shape. They end before the padding."""
        pieces = torch.split_with_sizes(flat[: self.numel], self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def position(self, parameter: nn.Parameter) -> int:
        """The number of ``parameter`` in this buffer."""
        return next(i for i, own in enumerate(self.parameters) if own is parameter)

    def owned(self, position: int) -> slice:
        """The part of the flattened parameter number ``position`` that lies in this rank's shard; maybe empty."""
        offset = sum(self.sizes[:position])
        stop = self.start + self.real - offset
        first = min(max(self.start - offset, 0), self.sizes[position])
        return slice(first, max(first, min(stop, self.sizes[position])))

    def pieces(self) -> list[Piece]:
        """Live views of what this rank owns of each parameter."""
        found, gradient = [], self.shard.grad
        for position, name in enumerate(self.names):
            start, own = self.owned(position).start, self._in_shard(position)
            found.append(
                Piece(name, start, self.shard.detach()[own], None if gradient is None else gradient.detach()[own])
            )
        return found

    def cut(self, like: Tensor) -> dict[str, Span]:
        """What this rank owns of each parameter, as live spans of ``like`` [s]; padding is in none."""
        return {
            name: Span(self.shapes[position], self.owned(position).start, like[self._in_shard(position)])
            for position, name in enumerate(self.names)
        }

    def _in_shard(self, position: int) -> slice:
        """Where in the shard lies what this rank owns of parameter number ``position``."""
        part = self.owned(position)
        offset = sum(self.sizes[:position]) - self.start
        return slice(offset + part.start, offset + part.stop) if part.stop > part.start else slice(0, 0)

    def add_local(self, position: int, gradient: Tensor) -> None:
        """Add a whole gradient of parameter number ``position`` that no backward has put into its ``.grad``.

        Kept apart from ``.grad``, which autograd wants in the shape that a freed parameter does not have.
        """
        self._added[position] = _sum(self._added[position], gradient)

    def local_gradients(self) -> list[Tensor | None]:
        """The unreduced whole gradients, one a parameter: from backwards and from ``add_local``."""
        return [_sum(parameter.grad, added) for parameter, added in zip(self.parameters, self._added, strict=True)]

    def lift_gradients(self) -> None:
        """Move what backwards have left in another dtype than the shard's to what is added in the shard's.

        autograd would add the next backward's in the dtype that the model computes in.
        """
        for position, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad.dtype != self.dtype:
                self.add_local(position, parameter.grad.to(self.dtype))
                parameter.grad = None

    def drop_local_gradients(self) -> None:
        """Forget unreduced gradients."""
        self._added = [None] * len(self.names)
        for parameter in self.parameters:
            parameter.grad = None

    def allocate(self) -> Tensor:
        """Give ``full`` its memory back, contents undefined, and return it."""
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        return self.full

    def attach(self) -> None:
        """Let every parameter view its piece of ``full``."""
        for parameter, piece in zip(self.parameters, self._pieces, strict=True):
            parameter.data = piece

    def free(self) -> None:
        """Return the memory of ``full``. Views that autograd saved survive: they read the storage refilled later."""
        for parameter in self.parameters:
            parameter.data = self._nothing
        self.full.untyped_storage().resize_(0)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _check_uniform(named: Mapping[str, nn.Parameter]) -> None:
    kinds = {(parameter.dtype, parameter.device): name for name, parameter in named.items()}
    if len(kinds) > 1:
        seen = ", ".join(f"{name} is {dtype} on {device}" for (dtype, device), name in kinds.items())
        raise TypeError(f"parameters of one unit need one dtype and one device, got: {seen}; put them in other units")
