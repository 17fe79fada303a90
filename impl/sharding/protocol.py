"""Sharded: what the training step needs of a sharded model, however it is sharded.

Two ways exist: ``wrap.ShardedModel`` (flat buffers, everything written out) and ``per_parameter.PerParameterModel``
(PyTorch's ``fully_shard``). The clipping engine - hooks, aggregate, clip, step - knows this protocol only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from .collectives import Axis
from .parameter_slots import Slot
from .spans import Span


@dataclass(frozen=True)
class Piece:
    """The part of one trainable parameter that this rank owns, flattened and without padding; it may be empty.

    ``start`` is the position of its first element in the flattened whole parameter. ``value`` [n] and ``gradient`` [n]
    (None before a reduction) are live views. ``copied``: another rank of the sharding axis has the same piece, and is
    the one that counts in a sum over ranks.
    """

    name: str
    start: int
    value: Tensor
    gradient: Tensor | None
    copied: bool = False


Gradients = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Whole local gradients of the parameters of these canonical names; one that has none is missing."""


class Sharded(Protocol):
    """A model whose parameters are sharded over ``axis`` and copied over ``replicas``.

    All ranks call each method together. Gradients are averaged over all ranks of both axes.
    """

    module: nn.Module
    axis: Axis
    replicas: Axis
    places: list[list[Slot]]
    """All places of each parameter, as they were before sharding, parameters in canonical order."""
    steps_taken: int
    """Steps that trainers have taken with these parameters. Noise is a function of it, so checkpoints hold it."""

    def __call__(self, *inputs: Any) -> Any:
        """The module's forward, each unit gathered when its turn comes."""

    def backward(self, outputs: Tensor, gradients: Tensor, *, sync: bool) -> None:
        """Backpropagate ``gradients`` from ``outputs`` (equal shapes) into the parameters.

        ``sync`` says that ``reduce_gradients`` follows: an implementation may reduce during the backward already.
        """

    def gradients_of_outputs(self, *, again: bool) -> AbstractContextManager[None]:
        """Around a backward that forms no parameter gradients; ``again``: another one on the same graph follows."""

    def add_gradients(self, gradients: Gradients, *, sync: bool) -> None:
        """Add whole local gradients to what the next reduction averages.

        ``sync`` says that ``reduce_gradients`` follows at once: then it asks for the gradients unit by unit, so that
        those of one unit only exist at a time. Otherwise they are asked for now.
        """

    def reduce_gradients(self) -> None:
        """Average what has accumulated over the ranks, and add this rank's pieces to the shards' gradients."""

    def reshard(self) -> None:
        """Free whatever is still gathered."""

    def zero_grad(self) -> None:
        """Forget reduced and unreduced gradients."""

    def abandon(self) -> None:
        """After an exception in a forward or backward: free gathered units and drop gradients, without communication.

        The next forward starts afresh, or raises RuntimeError where the implementation cannot recover.
        """

    def shards(self) -> list[nn.Parameter]:
        """The trainable shards: what an optimizer updates. All of them, also those that are wholly padding."""

    def frozen_shards(self) -> list[nn.Parameter]:
        """The shards that no optimizer updates."""

    def cut(self, shard: nn.Parameter, like: Tensor) -> dict[str, Span]:
        """The parameters in one shard of the model, by canonical name, as live spans of ``like``, without padding.

        ``like`` is elementwise like ``shard``: its value, its gradient, a moment of an optimizer.
        """

    def pieces(self) -> list[Piece]:
        """This rank's pieces of the trainable parameters, in one order on all ranks."""

    def owned(self, name: str) -> slice:
        """The part of the flattened parameter of that canonical name that this rank answers for; maybe empty.

        It is what lies in its shard; of a parameter that every rank holds, a part that no other rank answers for.
        """

    def in_root(self, name: str) -> bool:
        """Whether the parameter belongs to the root unit."""

    def is_unit(self, module: nn.Module) -> bool:
        """Whether ``module`` is gathered and freed on its own."""

    def full_values(self) -> dict[str, Tensor]:
        """Every parameter, whole and new, by canonical name. Communicates."""

    def full_gradients(self) -> dict[str, Tensor]:
        """Every reduced gradient of a trainable parameter, whole and new; zeros before a reduction. Communicates."""
