"""What tests of raised scripts share: a thread whose floats are raised, and a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fsdpcheck.comparison.precision.arithmetic import Arithmetic
from fsdpcheck.comparison.precision.entrances import installed
from fsdpcheck.comparison.precision.entry import in_arithmetic


@contextmanager
def raised() -> Iterator[Counter[str]]:
    """While open, this thread computes in float64; gives its notes."""
    notes: Counter[str] = Counter()
    with installed(), in_arithmetic(Arithmetic("float64"), notes, 0):
        yield notes


def assert_all_is_raised(notes: Counter[str]) -> None:
    assert not [note for note in notes if note.startswith("low precision")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.more = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        hidden = hidden + self.attend(hidden, hidden, hidden, attn_mask=mask, need_weights=False)[0]
        result: Tensor = self.more(self.norm(hidden)).squeeze(-1)
        return result
