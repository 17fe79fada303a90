"""torch.optim.Muon of matrices that ``fully_shard`` has sharded: Newton-Schulz is of the whole matrix, bit for bit.

It computes in bfloat16, which rounds, in another order on each number of ranks. Here nothing does: gradients are of -1,
0 and 1, the norm is clamped to a power of two by ``eps``, coefficients are dyadic, and all that is summed has 8 bits.
Other numbers, with the coefficients that people train with, are judged by ``fsdpcheck compare``, in more digits.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdpcheck

NORM = 4.0
"""``eps``: no norm of a matrix that is drawn here is greater."""


def _updated(gradient: Tensor, ranks: int, of_shards: bool = False) -> Tensor:
    """The whole weight, from 0, after one step of Muon with ``gradient``, [rows, columns], on ``ranks`` ranks."""
    layer = nn.Linear(gradient.shape[1], gradient.shape[0], bias=False)
    nn.init.zeros_(layer.weight)
    weight: Tensor = layer.weight
    if ranks > 1:
        fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
        weight = layer.weight
        assert isinstance(weight, DTensor)
        if of_shards:  # a mistake: each rank makes its own rows orthogonal
            weight = nn.Parameter(weight.to_local())
    layer(torch.ones(1, gradient.shape[1])).sum().backward()
    if isinstance(layer.weight, DTensor):
        shared = DTensor.from_local(_rows(gradient, layer.weight), layer.weight.device_mesh, layer.weight.placements)
        weight.grad = shared.to_local() if of_shards else shared
    else:
        weight.grad = gradient
    settings = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "eps": NORM, "ns_steps": 1, "adjust_lr_fn": None}
    torch.optim.Muon([weight], ns_coefficients=(2.0, -1.0, 0.5), **settings).step()
    if of_shards:
        assert isinstance(layer.weight, DTensor)
        placed = layer.weight
        return DTensor.from_local(weight.detach(), placed.device_mesh, placed.placements).full_tensor()
    return layer.weight.full_tensor() if isinstance(layer.weight, DTensor) else layer.weight.detach()


def _rows(gradient: Tensor, weight: DTensor) -> Tensor:
    ranks, rank = weight.device_mesh.size(), weight.device_mesh.get_local_rank()
    return gradient.chunk(ranks)[rank].clone()


MATRICES = [
    torch.tensor([[1.0, 1], [-1, 1], [0, 1], [1, 0]]),
    torch.tensor([[1.0, -1, 0, 1], [1, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0]]),
    torch.tensor([[1.0, 0, -1, 0, 1, 0], [0, 1, 0, 1, 0, 1], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]),
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("gradient", MATRICES, ids=lambda matrix: "x".join(map(str, matrix.shape)))
def test_the_update_is_that_of_the_whole_matrix(gradient: Tensor, ranks: int) -> None:
    assert float(gradient.norm()) < NORM
    wanted = _updated(gradient, 1)
    for got in fsdpcheck.simulate(_updated, ranks, (gradient, ranks)).check().returned:
        assert torch.equal(got, wanted)
    mistaken = fsdpcheck.simulate(_updated, ranks, (gradient, ranks, True)).check().returned
    assert all(torch.equal(one, other) for one, other in pairwise(mistaken))
    assert not torch.equal(mistaken[0], wanted)


def test_a_matrix_with_fewer_rows_than_ranks_cannot_be_trained() -> None:
    """docs/upstream/muon_fewer_rows_than_ranks.py: of torch 2.13."""
    failure = fsdpcheck.simulate(_few, 2).failure
    assert failure is not None
    assert "in-place operations that require placement changes are not supported" in str(failure)


def _few() -> None:
    layer = nn.Linear(4, 1, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    layer(torch.ones(1, 4)).sum().backward()
    torch.optim.Muon(layer.parameters()).step()
