"""Models of training cases: chains of layers, or a user's own by reference. A part of ``TrainingCase``.

Shapes: B samples in a logical batch, T positions of a sequence, d input and p output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdpcheck.case.vocabulary import Trait

LayerKind = Literal["linear", "layer_norm", "rms_norm", "group_norm", "conv", "attention"]
Activation = Literal[
    "identity", "relu", "leaky_relu", "hardtanh", "abs", "gelu", "silu", "tanh", "sigmoid", "softmax"
]  # fmt: skip
Freeze = Literal["none", "weight", "bias", "all"]
Used = Literal["once", "routed", "twice", "for all", "dropped", "beside", "across", "reordered"]
Bags = Literal["sum", "mean"]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
Mask = Literal["none", "causal", "keys", "both"]
InputKind = Literal["vector", "sequence", "tokens", "bags", "signal", "image", "volume"]
Named = Literal["", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer with parameters (``width`` output features or channels) and the activation behind it.

    "linear": on [n, d] or [n, T, d]. "layer_norm", "rms_norm": the same, ``width`` is the d that reaches them; a
    rms_norm has no bias. "conv": 1-D on a "signal" [n, C, L], 2-D on an "image" [n, C, L, L], 3-D on a "volume"
    [n, C, L, L, L], with ``kernel``, ``stride``, ``padding``, ``dilation`` equal in every direction and ``groups``.
    "group_norm": on the same shapes, ``groups`` groups of the ``width`` channels that reach it, always with a bias.
    "attention": on [n, T, d], ``width`` = d; four Linear layers (query, key, value, output) and one head, or with
    ``heads`` above 0 an nn.MultiheadAttention of so many. ``frozen`` and ``bias`` hold for all of its parameters.
    ``used``: how often a sample goes through it in one forward. "routed": not at all unless the first number of what
    arrives is above zero, as where a router chooses an expert; a forward all of whose samples leave it out does not
    call it. "twice": its output goes through it again. "for all": it runs on one row of ones, and what it gives of
    that is added to each sample's, as positions are that one row numbers for all. "dropped": it runs, and nothing uses
    what it gives. "beside": to what a Linear gives is added what ``F.linear`` makes of the same with its weight, as
    code that shares a weight without its module does. "across": to what a sample gets of it is added what the sample
    before gets. "reordered": it is given the samples in another order, and what it gives is put back in theirs.
    ``same``: a convolution of stride 1 is padded to give as many positions as arrive, ``padding`` is 0.
    ``padding_mode``: what a convolution is padded with, as torch names it; but for "zeros" with fewer than arrive.
    ``mask``: what an nn.MultiheadAttention leaves out. "causal": of each position those behind it, said by a mask and
    by a hint. "keys": of each sample the positions, but for the first, whose first number is below zero, as where
    sequences of several lengths are padded. "both": either. The others have no numbers that are real.
    """

    width: int
    bias: bool = False
    activation: Activation = "identity"
    frozen: Freeze = "none"
    kind: LayerKind = "linear"
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    used: Used = "once"
    heads: int = 0
    same: bool = False
    padding_mode: PaddingMode = "zeros"
    mask: Mask = "none"


@dataclass(frozen=True, slots=True)
class UserModelSpec:
    """A model, a batch and a loss of the user's own, by reference ("pkg.mod:attr"), and what was seen of them.

    The references are imported when the case runs, so a case from elsewhere is run only after its reader has repeated
    them (findings/tokens.py). ``loss`` "" is the built-in one: half the squared error, or cross-entropy of integer
    targets.
    ``units``: names of the modules to shard, in forward order. ``rows``: size of dim 0 of each parameter.
    ``features`` F and ``targets`` count one sample's output and targets, flattened. ``traits``: what the model itself
    demands of an implementation. ``names``: the narrowest dtype that its forward or its loss asks for by name, below
    the one it is given, if any; its cases are in float32 then, or ``widened``. ``gauge``: whether plain training gives
    the harness's own layer beside the model a gradient. ``optimizer``: by reference too, what makes the optimizer of
    plain training; "" where optimizers are drawn.
    """

    build: str
    batch: str
    loss: str = ""
    units: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    features: int = 1
    targets: int = 1
    traits: tuple[Trait, ...] = ()
    names: Named = ""
    gauge: bool = True
    optimizer: str = ""

    @property
    def widened(self) -> bool:
        """Whether its integers may be in float64: ranks and the single device compute in float64 what it names.

        In float32 alone it is as it is, in few bits. A model that names fewer still is about them, and is not widened.
        """
        return self.names == "float32"

    @property
    def references(self) -> tuple[str, str, str, str]:
        """Model, batch, loss and optimizer, by reference; "" of what is not the user's own."""
        return self.build, self.batch, self.loss, self.optimizer


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An ordinary model: an input stage, a chain of layers, units for sharding.

    ``features`` is the width d (channels C) that reaches the first layer. ``input``: "vector" is [B, d], "sequence"
    [B, T, d], "tokens" [B, T] through an Embedding of ``vocabulary`` rows (row ``padding_idx`` is padding if not None),
    "bags" [B, T] through an EmbeddingBag that adds its rows up to [B, d] or averages them (``bags``), "signal"
    [B, C, L], "image" [B, C, L, L], "volume" [B, C, L, L, L]; T and L are ``length``. Behind the convolutions a Flatten
    stands before the first layer that works on rows. ``layer_norm`` puts a LayerNorm (eps 0) on the raw input of
    "vector" and "sequence", whose rows are then balanced +-2^k; a layer of kind "layer_norm" stands anywhere and needs
    a surrogate to be exact.
    ``tied`` names two layers (0-based, among ``layers``) that share one weight; -1 is the Embedding.
    ``units``: sizes of the sharding units, counted over [input stage, if it has parameters] + layers, in order; what is
    left over stays with the root unit, as does the instrument (see oracle/certificate.py). ``bare_units``: a unit of
    one layer is that layer itself, as ``fully_shard(model.head)`` has it, and not a module that holds it.
    ``own``: a model of the user's own; then there are no layers and every other field has its default.
    """

    layers: tuple[LayerSpec, ...]
    input: InputKind = "vector"
    features: int = 1
    length: int = 1
    vocabulary: int = 2
    padding_idx: int | None = None
    layer_norm: bool = False
    tied: tuple[int, int] | None = None
    units: tuple[int, ...] = ()
    own: UserModelSpec | None = None
    bags: Bags = "sum"
    bare_units: bool = False

    @property
    def unit_count(self) -> int:
        """How many inner sharding units there are."""
        return len(self.units) if self.own is None else len(self.own.units)

    @property
    def has_front(self) -> bool:
        """Whether the input stage owns parameters (Embedding, EmbeddingBag or LayerNorm)."""
        return self.input in ("tokens", "bags") or self.layer_norm
