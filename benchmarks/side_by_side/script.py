"""A training script as people write it, on two gloo ranks, and the same on one device; float32, no noise.

``python -m benchmarks.side_by_side.script`` reads lines "MODE DEBUG [FAULT]" and answers each with a line of JSON: what
was raised, or whether ``torch.allclose`` holds of every parameter at its defaults; and how often ranks ran the
altered line. The fault is in place in both trainings, as a mistake in a library is. DEBUG is a level of
``TORCH_DISTRIBUTED_DEBUG``.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.side_by_side.faults import ALL
from tests.mechanisms.planting import Hits

RANKS: Final = 2
OF_OPACUS: Final = {"ghost_fsdp": "ghost", "ghost": "ghost", "hooks": "hooks"}
"""``grad_sample_mode`` of the ranks, and that of one device."""
MODES: Final = ("fully_shard", *OF_OPACUS)
_PATIENCE: Final = timedelta(seconds=30)
SECONDS: Final = 120.0
"""After which it hangs: a rank waits for a collective for 30."""
SEED: Final = 1
"""With 0, ``allclose`` fails in two of the four modes where there is no fault."""


class Classifier(nn.Module):
    """Of sequences of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.hidden = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.hidden(self.embedding(tokens))))
        out: Tensor = self.head(hidden.mean(dim=1))
        return out


def loader(ranks: int, rank: int) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of 16 sequences over all ranks, in order."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (128, 6), generator=generator)
    data = TensorDataset(tokens, torch.randint(0, 10, (128,), generator=generator))
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=16 // ranks, sampler=sampler)


def sharded_training(ranks: int, rank: int) -> nn.Module:
    """Two micro-batches a step, gradients clipped by their global norm."""
    torch.manual_seed(SEED)
    net: Any = Classifier()
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in net.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer, loss = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss()
    for number, (tokens, targets) in enumerate(loader(ranks, rank)):
        last = number % 2 == 1
        if ranks > 1:
            net.set_requires_gradient_sync(last)
        (loss(net(tokens), targets) / 2).backward()
        if last:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return net  # type: ignore[no-any-return]


def private_training(mode: str, ranks: int, rank: int) -> nn.Module:
    """Opacus' documented loop."""
    from opacus import PrivacyEngine
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.utils.fsdp_utils import FSDP2Wrapper

    torch.manual_seed(SEED)
    net: nn.Module = Classifier()
    if ranks > 1:
        net = FSDP2Wrapper(net) if mode == "ghost_fsdp" else DifferentiallyPrivateDistributedDataParallel(net)
    mode = mode if ranks > 1 else OF_OPACUS[mode]
    loss: Any = nn.CrossEntropyLoss()
    private, optimizer, *rest = PrivacyEngine().make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9), criterion=loss,
        data_loader=loader(ranks, rank), noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False,
        grad_sample_mode=mode,
    )  # fmt: skip
    loss = rest[0] if len(rest) > 1 else loss
    for tokens, targets in loader(ranks, rank):
        optimizer.zero_grad()
        loss(private(tokens), targets).backward()
        optimizer.step()
    return net


def trained(mode: str, ranks: int, rank: int) -> list[Tensor]:
    """The whole parameters after a few steps."""
    net = sharded_training(ranks, rank) if mode == "fully_shard" else private_training(mode, ranks, rank)
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in net.parameters()]


@contextmanager
def planted(fault: str) -> Iterator[Hits]:
    """With the fault of this name in place; "" plants none."""
    if not fault:
        yield Hits()
        return
    with ALL[fault]() as hits:
        yield hits


def one_rank(rank: int, mode: str, fault: str, folder: str) -> None:
    """One of ``RANKS`` processes; its parameters and hits are in a file when it ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=_PATIENCE)
    with planted(fault) as hits:
        try:
            values = trained(mode, RANKS, rank)
        finally:
            torch.save(hits.hits, f"{folder}/hits{rank}")
    torch.save(values, f"{folder}/values{rank}")
    dist.barrier()
    dist.destroy_process_group()


def report(mode: str, fault: str) -> dict[str, Any]:
    """What came of it: {"raised", "close", "hits"}."""
    with tempfile.TemporaryDirectory() as folder:
        raised = ""
        try:
            torch.multiprocessing.start_processes(one_rank, (mode, fault, folder), RANKS, start_method="fork")
        except Exception as error:
            raised = next((line for line in reversed(str(error).strip().splitlines()) if line.strip()), "")
        hits = [torch.load(f"{folder}/hits{rank}") for rank in range(RANKS)] if not raised else []
        if raised:
            return {"raised": raised[:300], "close": False, "hits": sum(hits)}
        ranks = [torch.load(f"{folder}/values{rank}") for rank in range(RANKS)]
    with planted(fault):
        single = trained(mode, 1, 0)
    close = all(torch.allclose(a, b) for values in ranks for a, b in zip(values, single, strict=True))
    return {"raised": "", "close": close, "hits": sum(hits)}


def apart(mode: str, debug: str, fault: str) -> dict[str, Any]:
    """The report from a process of its own, which has ``SECONDS``."""
    context = torch.multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def run() -> None:
        os.setsid()
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = debug
        dist.set_debug_level_from_env()
        theirs.send(report(mode, fault))

    process = context.Process(target=run)
    process.start()
    said = mine.recv() if mine.poll(SECONDS) else {"raised": "hang", "close": False, "hits": 0}
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    return said  # type: ignore[no-any-return]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        mode, debug, *fault = line.split()
        if mode in OF_OPACUS:  # once, and not in each process that is forked
            importlib.import_module("opacus.utils.fsdp_utils")
        print(json.dumps(apart(mode, debug, "".join(fault))), flush=True)
