"""A parameter has the name that the unwrapped model has for it, on any number of ranks and in any wrapper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.comparison.observation.observing import observe, same

PLAIN = ["one.bias", "one.weight", "two.weight"]


def _names(folder: Path, source: str, size: int = 1, kind: str = "parameter") -> list[str]:
    return sorted(observe(folder, source, size).values(kind))


@pytest.mark.parametrize(
    "wrapped",
    [
        "Net()",
        "nn.parallel.DistributedDataParallel(Net())",
        pytest.param("torch.compile(Net(), backend='eager')", marks=pytest.mark.nightly),
        "checkpointed()",
        "flat()",
        "Own(Net())",
    ],
)
def test_wrappers_have_no_part_in_names(tmp_path: Path, wrapped: str) -> None:
    source = f"""
    class Own(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
        def forward(self, x):
            return self.module(x)
    def checkpointed():
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        model = Net()
        model.one = checkpoint_wrapper(model.one)
        return checkpoint_wrapper(model)
    def flat():
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        model = Net()
        model.one = FSDP(checkpoint_wrapper(model.one), device_id=torch.device("cpu"), use_orig_params=True)
        return FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    model = {wrapped}
    train(model, torch.optim.SGD(model.parameters(), lr=0.125))
    """
    assert _names(tmp_path, source) == PLAIN
    assert observe(tmp_path, source, 1).notes == []


def test_a_module_of_a_model_that_is_called_module_keeps_its_name_beside_others(tmp_path: Path) -> None:
    source = """
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.head = nn.Linear(3, 2), nn.Linear(2, 2)
        def forward(self, x):
            return self.head(self.module(x))
    model = Two()
    train(model, torch.optim.SGD(model.parameters(), lr=0.125))
    """
    assert _names(tmp_path, source) == ["head.bias", "head.weight", "module.bias", "module.weight"]


@pytest.mark.parametrize("model", ["Tied()", "fully_shard(Tied())", "FSDP(Tied(), device_id=torch.device('cpu'))"])
def test_a_tied_parameter_has_one_name(tmp_path: Path, model: str) -> None:
    source = f"""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.last.weight = self.first.weight
        def forward(self, x):
            return self.last(self.first(x))[:, :2]
    model = {model}
    train(model, torch.optim.SGD(model.parameters(), lr=0.125))
    """
    assert _names(tmp_path, source, 2) == ["first.weight"]


def test_roots_are_told_apart_only_where_names_meet(tmp_path: Path) -> None:
    source = """
    class Generator(Net): pass
    class Judge(Net): pass
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)
        def forward(self, x):
            return self.head(x)
    models = Generator(last=3), Judge(), Judge(), Head()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.125) for model in models]
    made = models[0](x)
    models[3](models[1](made) + models[2](made)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    """
    names = [f"{root}.{name}" for root in ("Generator", "Judge", "Judge#2") for name in PLAIN]
    assert _names(tmp_path, source) == sorted([*names, "head.bias", "head.weight"])


def test_a_model_that_is_not_trained_does_not_count(tmp_path: Path) -> None:
    source = """
    model, teacher = Net(), Net()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    F.mse_loss(model(x), teacher(x).detach()).backward()
    optimizer.step()
    averaged.update_parameters(model)
    averaged(x)
    """
    assert _names(tmp_path, source) == PLAIN


def test_a_part_that_is_also_called_alone_is_no_root(tmp_path: Path) -> None:
    source = """
    model = Net()
    model.one(x).sum().backward()
    train(model, torch.optim.SGD(model.parameters(), lr=0.125))
    """
    assert _names(tmp_path, source) == PLAIN


def test_parameters_of_no_module_are_numbered_by_their_optimizers(tmp_path: Path) -> None:
    source = """
    parameters = [nn.Parameter(whole_numbers(3, 2)) for _ in range(3)]
    sum((x @ parameter).sum() for parameter in parameters).backward()
    torch.optim.SGD(parameters[:2], lr=0.125).step()
    torch.optim.SGD(parameters[2:], lr=0.125).step()
    """
    assert _names(tmp_path, source) == ["parameter 0 of SGD", "parameter 0 of SGD#2", "parameter 1 of SGD"]


def test_two_optimizers_of_one_parameter_are_both_seen(tmp_path: Path) -> None:
    source = """
    model = Net()
    first, second = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.125, 0.25))
    model(x).sum().backward()
    first.step()
    second.step()
    """
    observed = observe(tmp_path, source, 1)
    assert sorted(observed.values("parameter")) == sorted([*PLAIN, *(f"{name} (optimizer 1)" for name in PLAIN)])
    assert observed.observation.ranks[0].steps == [1, 1]
    assert observed.value("option lr", "one.bias (optimizer 1)") == 0.25


PIPELINE = """
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    layers = [nn.Linear(3, 3) for _ in range(4)]
    for number, layer in enumerate(layers):
        layer.weight.data, layer.bias.data = whole_numbers(3, 3) + number, whole_numbers(3) - number
    class Keeps(nn.Module):
        def __init__(self, first, layers):
            super().__init__()
            for number, layer in enumerate(layers, first):
                self.add_module(str(number), layer)
        def forward(self, x):
            for layer in self.children():
                x = layer(x)
            return x
    per = len(layers) // W
    mine = layers[rank * per : (rank + 1) * per]
    part = MADE
    optimizer = torch.optim.SGD(part.parameters(), lr=0.125)
    total = lambda output, target: (output - target).sum()
    if W == 1:
        total(part(x), x).backward()
    else:
        stage = PipelineStage(part, rank, W, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=total, scale_grads=False)
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == W - 1 else {}))
    optimizer.step()
"""


def test_stages_that_keep_names_have_those_of_the_whole(tmp_path: Path) -> None:
    source = PIPELINE.replace("MADE", "Keeps(rank * per, mine)")
    one, two, four = (observe(tmp_path, source, size) for size in (1, 2, 4))
    for several in (two, four):
        for kind in ("initial parameter", "gradient", "parameter"):
            assert len(same(one, several, kind)) == 8
        assert (several.whole.replicas, several.whole.gaps) == ({}, {})
    assert {name for record in four.observation.ranks for batch in record.batches[0] for name in batch.rows} == {"x"}


def test_stages_that_number_their_parts_are_numbered_through(tmp_path: Path) -> None:
    source = PIPELINE.replace("MADE", "nn.Sequential(*mine)")
    one, two, four = (observe(tmp_path, source, size) for size in (1, 2, 4))
    assert same(two, four, "initial parameter") == [f"parameter {number} of the pipeline" for number in range(8)]
    assert same(two, four, "gradient")
    assert same(two, four, "parameter")
    whole = list(one.values("parameter").values())
    assert all(torch.equal(*pair) for pair in zip(whole, two.values("parameter").values(), strict=True))
    assert (two.whole.replicas, four.whole.replicas) == ({}, {})
