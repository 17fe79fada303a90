"""Small made data sets in the formats that public scripts read. Nothing of them is downloaded."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

_SEED: Final = 20
_CLASSES: Final = ("one", "two")
_SIDE: Final = 64


def images(folder: Path) -> None:
    """An ImageFolder "images": 8 images to train on, 4 for each name of a validation set."""
    from PIL import Image

    numbers = np.random.default_rng(_SEED)
    for split, count in (("train", 8), ("val", 4), ("validation", 4)):
        for index in range(count):
            place = folder / "images" / split / _CLASSES[index % len(_CLASSES)]
            place.mkdir(parents=True, exist_ok=True)
            pixels = numbers.integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{index}.png")


def mnist(folder: Path) -> None:
    """The four files of MNIST, with 256 and 64 digits, where torchvision and temporary folders have them."""
    numbers = np.random.default_rng(_SEED)
    for root in (folder / "data", folder):
        raw = root / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for split, count in (("train", 256), ("t10k", 64)):
            pixels = numbers.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            header = struct.pack(">IIII", 2051, *pixels.shape)
            (raw / f"{split}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
            labels = numbers.integers(0, 10, count, dtype=np.uint8)
            (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


def tokens(folder: Path) -> None:
    """Tokens of 16 bits, as nanoGPT has them, in data/made."""
    place = folder / "data" / "made"
    place.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(_SEED)
    for split in ("train", "val"):
        numbers.integers(0, 1000, 4096).astype(np.uint16).tofile(place / f"{split}.bin")


MAKERS: Final[dict[str, Callable[[Path], None]]] = {"images": images, "mnist": mnist, "tokens": tokens}
"""By the name that the list of scripts gives them."""
