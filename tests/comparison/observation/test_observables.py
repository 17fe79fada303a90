"""What is kept of each step: states, options, norms, losses and checkpoints, of optimizers of any kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint.state_dict

from fsdpcheck.comparison.record import Key
from tests.comparison.observation.observing import line_of, observe, same

PLAIN = ["one.bias", "one.weight", "two.weight"]


def test_options_are_those_of_the_step(tmp_path: Path) -> None:
    source = """
    model = Net()
    groups = [{"params": model.one.parameters(), "weight_decay": 0.5}, {"params": model.two.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.5), betas=(0.75, 0.5), weight_decay=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        schedule.step()
    """
    observed = observe(tmp_path, source, 1)
    assert [float(observed.value("option lr", "two.weight", step)) for step in (0, 1)] == [0.5, 0.25]
    assert float(observed.value("option betas.1", "one.bias")) == 0.5
    assert [float(observed.value("option weight_decay", name)) for name in ("one.bias", "two.weight")] == [0.5, 0.25]
    kinds = {key.kind for key in observed.whole.values if key.kind.startswith("option")}
    assert kinds == {f"option {name}" for name in ("lr", "betas.0", "betas.1", "eps", "weight_decay", "initial_lr")}


def test_a_loss_that_an_optimizer_keeps_is_each_ranks_own_and_no_state(tmp_path: Path) -> None:
    source = """
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.125, max_iter=2)
    def closure():
        optimizer.zero_grad()
        loss = model(x[2 * dist.get_rank() :][:2]).square().sum()
        loss.backward()
        return loss
    optimizer.step(closure)
    """
    observed = observe(tmp_path, source, 2)
    kinds = {key.kind for key in observed.whole.values if key.kind.startswith("state")}
    assert "state n_iter" in kinds
    assert "state prev_loss" not in kinds
    assert [key for key in observed.whole.replicas if key.kind.startswith("state")] == []


@pytest.mark.parametrize(
    ("model", "clip"),
    [
        ("nn.parallel.DistributedDataParallel(Net())", "nn.utils.clip_grad_norm_(model.parameters(), 1.0, 1.0)"),
        ("fully_shard(Net())", "nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0)"),
        ("fully_shard(Net())", "nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type=1.0)"),
        ("fully_shard(Net())", "nn.utils.get_total_norm([p.grad for p in model.parameters()], float('inf'))"),
        ("FSDP(Net().float(), device_id=torch.device('cpu'))", "model.clip_grad_norm_(1.0, 1.0)"),
    ],
)
def test_a_norm_is_that_of_the_whole_gradient(tmp_path: Path, model: str, clip: str) -> None:
    source = f"""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
    model = {model}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x[:1].to(next(model.parameters()).dtype)).sum().backward()
    {clip}
    optimizer.step()
    """
    one, two = (observe(tmp_path, source, size) for size in (1, 2))
    assert same(one, two, "norm") == ["0"]
    assert float(one.value("norm", "0")) > 1
    assert one.notes == two.notes == []


def test_losses_are_each_ranks_own(tmp_path: Path) -> None:
    source = """
    from torch.utils.checkpoint import checkpoint
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        summed = checkpoint(lambda x: model(x).sum(), x.clone().requires_grad_(), use_reentrant=True)
        (summed * 0 + rank).backward()
        torch.autograd.backward([model(x).sum() * 0 + 10 + rank])
        optimizer.step()
    """
    observed = observe(tmp_path, source, 2)
    for step in (0, 1):
        for number, first in (("0", 0), ("1", 10)):
            of_ranks = observed.whole.by_rank[Key(step, "loss", number)]
            assert {rank: float(value) for rank, value in of_ranks.items()} == {0: first, 1: first + 1}
    assert len(observed.whole.by_rank) == 4


def test_a_closure_s_gradients_are_seen_when_it_has_computed_them(tmp_path: Path) -> None:
    source = """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    def closure():
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss
    {step}
    """
    steps = ("optimizer.step(closure)", "optimizer.step(closure=closure)", "closure(); optimizer.step()")
    positional, keyword, without = (observe(tmp_path, source.replace("{step}", step), 1) for step in steps)
    assert same(without, positional, "gradient") == same(without, keyword, "gradient")
    assert sorted(same(without, positional, "parameter")) == PLAIN


def test_an_unused_parameter_has_no_gradient(tmp_path: Path) -> None:
    source = """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    model.one(x).sum().backward()
    optimizer.step()
    """
    observed = observe(tmp_path, source, 1)
    assert sorted(observed.values("gradient")) == ["bias", "weight"]
    assert len(observed.values("parameter")) == 3


def test_states_of_a_zero_optimizer_are_their_owners(tmp_path: Path) -> None:
    source = """
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = nn.parallel.DistributedDataParallel(Net())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.125))
    """
    observed = observe(tmp_path, source, 2)
    assert sorted(observed.values("state exp_avg", 1)) == PLAIN
    owners = [
        {key.name for key in record.pieces if key.kind == "state exp_avg"} for record in observed.observation.ranks
    ]
    assert owners[0].isdisjoint(owners[1])
    assert all(owners)
    assert observed.observation.ranks[0].steps == [2]


@pytest.mark.parametrize("size", [1, 2])
def test_what_fsdp_had_gathered_at_the_first_forward_and_has_freed_is_not_read(tmp_path: Path, size: int) -> None:
    source = """
    from torch.distributed.fsdp import fully_shard
    model = fully_shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for _ in range(2):
        model.unshard()
        model(x).sum().backward()
        optimizer.step()
    """
    observed = observe(tmp_path, source, size)
    assert observed.notes == []
    assert sorted(observed.values("parameter", 1)) == PLAIN


@pytest.mark.parametrize(
    ("source", "told", "line"),
    [
        (
            """
    model = Net()
    for _ in range(2):
        model(x).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.125 * parameter.grad
    """,
            "3 parameters changed, of shape (5, 3) say, and no step of an optimizer was seen; "
            "their module was first called at {at}",
            "model(x)",
        ),
        (
            """
    model = Net()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.125)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    model(x).sum().backward()
    """,
            "SGD steps in a backward, at {at}",
            "optimizer.step()",
        ),
        (
            """
    class Master(torch.optim.SGD):
        def __init__(self, parameters):
            self.model = list(parameters)
            super().__init__(self.model, lr=0.125)
            self.copies = [nn.Parameter(parameter.detach().clone()) for parameter in self.model]
            self.inner = torch.optim.SGD(self.copies, lr=0.125, momentum=0.5)
        def step(self):
            for parameter, copy in zip(self.model, self.copies):
                copy.grad = parameter.grad
            self.inner.step()
            for parameter, copy in zip(self.model, self.copies):
                parameter.data.copy_(copy)
    model = Net()
    train(model, Master(model.parameters()), steps=1)
    """,
            "the states of 3 tensors that SGD steps for another optimizer are not compared, at {at}",
            "self.inner.step()",
        ),
        (
            """
    from torch.distributed.tensor import DTensor, Shard
    mesh = init_device_mesh("cpu", (1,))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=(4,), stride=(1,)))
    torch.optim.SGD([parameter], lr=0.125).step()
    """,
            "the {kind} of a parameter of shape (4,) is not compared: (Shard(dim=0),) gives this rank 4 of its values, "
            "and it has 3, at {at}",
            ".step()",
        ),
        (
            """
    model = Net()
    model(x).backward(torch.ones(BATCH, 2))
    """,
            "a backward of tensors with several values is not compared as a loss, at {at}",
            "backward(",
        ),
    ],
)
def test_what_is_not_judged_is_a_note(tmp_path: Path, source: str, told: str, line: str) -> None:
    kinds = ("initial parameter", "parameter") if "{kind}" in told else ("",)
    assert observe(tmp_path, source, 1).notes == [told.format(at=line_of(source, line), kind=kind) for kind in kinds]


@pytest.mark.nightly
def test_a_step_that_is_compiled_is_not_seen_and_that_is_a_note(tmp_path: Path) -> None:
    source = """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    @torch.compile(backend="eager")
    def step():
        optimizer.step()
    model(x).sum().backward()
    step()
    """
    observed = observe(tmp_path, source, 1)
    line = line_of(source, "SGD(")
    assert f"no step was seen of the SGD made at {line}" in observed.notes
    assert any(note.startswith("3 parameters changed") for note in observed.notes)


def test_a_flat_part_of_a_part_is_a_note(tmp_path: Path) -> None:
    source = """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Net(6), mesh["tp"], {"one": ColwiseParallel(), "two": RowwiseParallel()})
    model = FSDP(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    model(x).sum().backward()
    optimizer.step()
    """
    observed = observe(tmp_path, source, 4)
    told = "it is a part of a part that FSDP has flattened"
    assert observed.notes
    assert all(told in note for note in observed.notes), observed.notes
    assert {key.kind for key in observed.whole.values} == {
        *("option lr", "option momentum", "option dampening", "option weight_decay")
    }


def test_an_optimizer_in_a_backward_is_seen_all_the_same(tmp_path: Path) -> None:
    source = """
    model = Net()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.125)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    model(x).sum().backward()
    """
    observed = observe(tmp_path, source, 1)
    assert sorted(observed.values("parameter")) == sorted(observed.values("gradient")) == PLAIN
    assert observed.observation.ranks[0].steps == [1, 1, 1]


def test_checkpoints_are_whole_by_file_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = """
    import io
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    model = fully_shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    train(model, optimizer, steps=1)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id="folder/at1")
    full = {name: tensor.full_tensor() for name, tensor in weights.items()}
    if rank == 0:
        torch.save({"model": full, "epoch": 1}, "last.pt")
        torch.save([full["one.bias"]], io.BytesIO())
        torch.save([full["one.bias"]], "last.pt")
    """
    one, two = (observe(tmp_path, source, size) for size in (1, 2))
    assert same(one, two, "checkpoint", 1)
    saved = two.values("checkpoint", 1)
    for name, value in two.values("parameter").items():
        assert torch.equal(saved[f"at1:model.{name}"], value)
        assert torch.equal(saved[f"last.pt:model.{name}"], value)
        assert torch.equal(saved[f"at1:optimizer.state.{name}.momentum_buffer"], two.values("gradient")[name])
    assert torch.equal(saved["(stream):0"], saved["last.pt#2:0"])
    read = [name for name in saved if name.endswith(" as read")]
    assert (len(saved) - len(read), len(read)) == (3 * 3 + 2, 2 * 3)
    assert two.notes == []


def test_each_is_seen_at_a_line_and_after_a_number_of_calls(tmp_path: Path) -> None:
    source = """
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    """
    observed = observe(tmp_path, source, 2)
    record, trace = observed.observation.ranks[1], observed.observation.traces[1]
    at = [Key(step, kind, name) for step in (0, 1) for kind, name in (("loss", "0"), ("gradient", "one.bias"))]
    assert [record.lines[key] for key in at] == [line_of(source, "backward()"), line_of(source, "optimizer.step()")] * 2
    reduced = [number for number, call in enumerate(trace) if call.op == "all_reduce"]
    assert [record.calls[key] for key in at] == [reduced[0], reduced[0] + 1, reduced[1], reduced[1] + 1]


def test_what_stands_in_place_of_a_trained_parameter_is_kept_as_it_is_at_the_end(tmp_path: Path) -> None:
    source = """
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.of_this_rank = nn.Parameter(whole_numbers(12 // W, 3), requires_grad=False)

        def forward(self, x):
            return x @ self.of_this_rank.T

    model, average = Net(), Net()
    Experts()(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    average(x)
    train(model, optimizer, steps=1)
    for one, other in zip(average.parameters(), model.parameters()):
        one.data.lerp_(other.data, 0.5)
    """
    observed = observe(tmp_path, source, 1)
    ends = {key.name: value for key, value in observed.whole.values.items() if key.kind == "final parameter"}
    assert sorted(ends) == PLAIN
    first, last = (observed.value(kind, "one.weight") for kind in ("initial parameter", "parameter"))
    assert torch.equal(ends["one.weight"], (first + last) / 2)
