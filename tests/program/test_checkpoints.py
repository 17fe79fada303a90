"""An ordinary model that is filled from a checkpoint: whose error it is if it cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from fsdpcheck import adapters
from fsdpcheck.errors import AdapterError, FsdpcheckError, MissingDependency, NotReadable
from fsdpcheck.program import checkpoints
from tests.common.cases_by_hand import SMALLEST


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeyError("weight"), (NotReadable, r"KeyError: 'weight', at .*test_checkpoints.py:\d+")),
        (MissingDependency("needs a package"), (AdapterError, "needs a package")),
    ],
    ids=["the implementation's", "the adapter's"],
)
def test_what_an_implementation_raises_is_for_a_law_and_what_an_adapter_says_is_not(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, said: tuple[type[FsdpcheckError], str]
) -> None:
    def read(folder: str, model: nn.Module) -> None:
        raise raised

    monkeypatch.setattr(adapters, "load", lambda reference: SimpleNamespace(read=read))
    kind, text = said
    with pytest.raises(kind, match=text):
        checkpoints.read("any", "folder", SMALLEST)
