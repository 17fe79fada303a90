"""The rows and labels that a script trains on are seen, whichever way they are given; what a model computes is not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from fsdpcheck.comparison.observation.batches import elements, numbers, rows
from tests.comparison.observation.observing import Observed, observe

STEP = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    def step(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def _batches(observed: Observed, step: int = 0) -> list[dict[str, tuple[str, ...]]]:
    return [dict(batch.rows) for record in observed.observation.ranks for batch in record.batches.get(step, [])]


def _labels(observed: Observed, step: int = 0) -> list[tuple[str, ...]]:
    return [batch.labels for record in observed.observation.ranks for batch in record.batches.get(step, [])]


def test_equal_rows_have_equal_hashes_whatever_they_lie_in() -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 3, 2)
    strided = whole.permute(0, 2, 1).contiguous().permute(0, 2, 1)
    first = rows(numbers(whole))
    assert first[1:3] == rows(numbers(whole[1:3].clone())) == rows(numbers(strided[1:3]))
    assert len(set(first)) == 4
    assert rows(numbers(whole.to(torch.bfloat16))) == first
    assert (
        rows(numbers(torch.tensor([3, 1]))) == rows(numbers(torch.tensor([[3], [1]], dtype=torch.int8))) == ("3", "1")
    )
    assert rows(numbers(torch.tensor(2.5))) == ("2.5",)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_elements_of_parts_add_up_however_the_whole_is_split(dtype: torch.dtype) -> None:
    whole = torch.arange(24).remainder(5).to(dtype).reshape(4, 3, 2)
    count, total = elements(numbers(whole))
    assert count == 24
    for dim in range(3):
        parts = [elements(numbers(part)) for part in whole.chunk(2, dim)]
        assert (sum(part[0] for part in parts), sum(part[1] for part in parts) % 2**64) == (count, total)
    other = whole.clone()
    other[3, 2, 1] = other[3, 2, 1] == 0
    assert elements(numbers(other))[1] != total


def test_elements_are_kept_of_inputs_and_labels(tmp_path: Path) -> None:
    source = f"""
    model = nn.Conv1d(2, 2, 1)
    {STEP.strip()}
    x, y = whole_numbers(3, 2, 4), whole_numbers(3, 2, 4)
    here = slice(rank * 4 // W, (rank + 1) * 4 // W)
    step(F.mse_loss(model(x[..., here]), y[..., here]))
    """
    one, two = (observe(tmp_path, source, size) for size in (1, 2))
    (whole,) = one.observation.ranks[0].batches[0]
    parts = [record.batches[0][0] for record in two.observation.ranks]
    assert set(whole.elements) == {"input", ""}
    for name, (count, total) in whole.elements.items():
        assert sum(part.elements[name][0] for part in parts) == count == 24
        assert sum(part.elements[name][1] for part in parts) % 2**64 == total
    assert set(whole.rows["input"]).isdisjoint(parts[0].rows["input"])


@pytest.mark.parametrize("how", ["x[here]", "x=x[here]"])
def test_ranks_together_have_the_rows_of_one_rank_by_the_names_of_the_forward(tmp_path: Path, how: str) -> None:
    source = f"""
    model = Net() if W == 1 else nn.parallel.DistributedDataParallel(Net())
    {STEP.strip()}
    here = slice(rank * BATCH // W, (rank + 1) * BATCH // W)
    step(nn.MSELoss()(model({how}), y[here]))
    """
    one, two = (observe(tmp_path, source, size) for size in (1, 2))
    assert [list(batch) for batch in _batches(two)] == [["x"], ["x"]]
    assert len(_batches(one)[0]["x"]) == 12
    for seen in (lambda run: [batch["x"] for batch in _batches(run)], _labels):
        assert Counter(row for rows in seen(two) for row in rows) == Counter(seen(one)[0])
        assert len(seen(two)[0]) == 6


def test_containers_are_looked_into(tmp_path: Path) -> None:
    observed = observe(
        tmp_path,
        f"""
    from typing import NamedTuple
    class Pair(NamedTuple):
        left: torch.Tensor
        right: torch.Tensor
    class Takes(Net):
        def forward(self, batch, *more, scale, labels=None, **others):
            return ((super().forward(batch["x"][0]) + more[0].left) * scale - labels).sum()
    model = Takes()
    {STEP.strip()}
    step(model(dict(x=[x]), Pair(y, y + 1), scale=torch.tensor(2), labels=y, mask=y > 0, name="a"))
    """,
        1,
    )
    assert sorted(_batches(observed)[0]) == ["0.left", "0.right", "batch.x.0", "labels", "mask", "scale"]
    assert _batches(observed)[0]["0.left"] == _batches(observed)[0]["labels"] != _batches(observed)[0]["0.right"]


@pytest.mark.parametrize(
    "loss",
    [
        "F.cross_entropy(model(x), y[:, 0].abs().long() % 2)",
        "F.cross_entropy(input=model(x), target=y[:, 0].abs().long() % 2)",
        "nn.CrossEntropyLoss()(model(x), y[:, 0].abs().long() % 2)",
        "nn.NLLLoss()(model(x), y[:, 0].abs().long() % 2)",
        "F.binary_cross_entropy_with_logits(model(x)[:, 0], (y[:, 0].abs().long() % 2).double())",
        "F.huber_loss(model(x)[:, 0], (y[:, 0].abs().long() % 2).double())",
        "F.mse_loss(model(x)[:, 0], (y[:, 0].abs().long() % 2).as_subclass(type('Own', (torch.Tensor,), {})))",
    ],
)
def test_labels_are_those_of_any_loss_function(tmp_path: Path, loss: str) -> None:
    observed = observe(tmp_path, f"model = Net()\n{STEP}\n    step({loss})".replace("\n    ", "\n"), 1)
    expected = [value.remainder(2) for value in torch.arange(1, 25)[::2].remainder(7).sub(3).abs()]
    assert [float(label) for label in _labels(observed)[0]] == [float(value) for value in expected]
    assert len(_batches(observed)) == 1


def test_forwards_that_are_no_training_are_not_counted(tmp_path: Path) -> None:
    observed = observe(
        tmp_path,
        f"""
    from torch.utils.checkpoint import checkpoint
    class Again(Net):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)
    model, transform = Again(), nn.Softmax(dim=1)
    {STEP.strip()}
    for _ in range(2):
        step(F.mse_loss(model(transform(x)), y))
        with torch.no_grad():
            F.mse_loss(model(x), y)
    """,
        1,
    )
    assert [len(_batches(observed, step)) for step in (0, 1, 2)] == [1, 1, 0]
    assert [len(labels) for labels in _labels(observed)] == [12]


def test_what_a_model_has_computed_is_no_data(tmp_path: Path) -> None:
    observed = observe(
        tmp_path,
        f"""
    model, judge = Net(last=3), Net(last=1)
    {STEP.strip()}
    fake = model(x)
    judge(fake).sum().backward()
    judge(fake.detach()).sum().backward()
    step(F.mse_loss(model(x), fake.detach()))
    judge(torch.cat([x, fake.detach()])[torch.randperm(2 * BATCH)])
    F.mse_loss(model(x)[:, :1], judge(x).detach())
    """,
        1,
    )
    assert [sorted(batch) for batch in _batches(observed)] == [["x"], [], [], ["x"]]
    assert _labels(observed) == [(), (), (), ()]
    assert _labels(observed, 1) == [(), (), ()]
    mixed = observed.observation.ranks[0].batches[1][0]
    alone = observed.observation.ranks[0].batches[0][0]
    assert sorted(mixed.rows["x"]) == sorted(alone.rows["x"])
    assert mixed.elements["x"] == alone.elements["x"]


def test_micro_batches_are_each_seen(tmp_path: Path) -> None:
    observed = observe(
        tmp_path,
        f"""
    model = Net()
    {STEP.strip()}
    for _ in range(2):
        F.mse_loss(model(x[:4]), y[:4]).backward()
        step(F.mse_loss(model(x[4:6]), y[4:6]))
    """,
        1,
    )
    for step in (0, 1):
        assert [len(batch["x"]) for batch in _batches(observed, step)] == [4, 2]
        assert [len(labels) for labels in _labels(observed, step)] == [4, 2]


def test_rows_inside_transforms_are_those_of_the_batch(tmp_path: Path) -> None:
    source = """
    from torch.func import functional_call, grad, vmap
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    def loss(parameters, x, y):
        return F.mse_loss(functional_call(model, parameters, (x,)), y)
    gradients = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].sum(0)
    optimizer.step()
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    """
    observed = observe(tmp_path, source, 1)
    assert _batches(observed) == _batches(observed, 1)
    assert _labels(observed) == _labels(observed, 1)
    assert len(_labels(observed)[0]) == 12
    assert sorted(observed.values("parameter")) == ["one.bias", "one.weight", "two.weight"]
    assert observed.notes == []


def test_a_pipeline_s_look_at_shapes_is_no_batch(tmp_path: Path) -> None:
    source = """
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    part = [Net(last=3), Net()][rank]
    optimizer = torch.optim.SGD(part.parameters(), lr=0.125)
    stage = PipelineStage(part, rank, W, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=3, loss_fn=F.mse_loss)
    schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": y}))
    optimizer.step()
    """
    observed = observe(tmp_path, source, 2)
    first, last = observed.observation.ranks
    assert [len(batch.rows["x"]) for batch in first.batches[0]] == [4, 4, 4]
    assert [len(batch.labels) for batch in last.batches[0]] == [4, 4, 4]
    assert [batch.rows for batch in last.batches[0]] == [{}, {}, {}]
    assert observed.notes == []
