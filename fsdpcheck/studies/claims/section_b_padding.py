"""Section B, padding: that it stays zero, and that nothing reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, OptimizerSpec, StepSpec, TrainingCase
from fsdpcheck.program import probes
from fsdpcheck.studies.claims import toys
from fsdpcheck.studies.claims.lab import Lab, impl
from fsdpcheck.studies.claims.registry import Outcome, claim, only_if, verdict


def optimizers() -> dict[str, Any]:
    """Every elementwise optimizer of torch, with what each offers of momentum and weight decay."""
    optim = torch.optim
    return {
        "SGD": lambda p: optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.1, nesterov=True),
        "Adam": lambda p: optim.Adam(p, lr=0.5, weight_decay=0.1, amsgrad=True),
        "AdamW": lambda p: optim.AdamW(p, lr=0.5, weight_decay=0.1),
        "NAdam": lambda p: optim.NAdam(p, lr=0.5, weight_decay=0.1),
        "RAdam": lambda p: optim.RAdam(p, lr=0.5, weight_decay=0.1),
        "Adamax": lambda p: optim.Adamax(p, lr=0.5, weight_decay=0.1),
        "Adagrad": lambda p: optim.Adagrad(p, lr=0.5, weight_decay=0.1),
        "Adadelta": lambda p: optim.Adadelta(p, lr=0.5, weight_decay=0.1),
        "RMSprop": lambda p: optim.RMSprop(p, lr=0.5, weight_decay=0.1, momentum=0.9, centered=True),
        "Rprop": lambda p: optim.Rprop(p, lr=0.5),
        "ASGD": lambda p: optim.ASGD(p, lr=0.5, weight_decay=0.1),
    }


class _Shifting(torch.optim.SGD):
    """Moves every element, whatever its gradient: what no promise about padding survives."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1.0)


@claim("B4", "Padding is zero after init, after reduce-scatter and after every optimizer step.")
def padding_is_zero(lab: Lab) -> Outcome:
    """Three steps by each optimizer of torch, noise added; an optimizer that moves zeros; what FSDP1 fills in."""
    counts = {name: _padding(lab, make) for name, make in optimizers().items()}
    looked, nonzero = (sum(count[i] for count in counts.values()) for i in (0, 1))
    shifted = _padding(lab, lambda p: _Shifting(p, lr=1.0))[1]
    theirs = sorted({value for values in lab.ranks(_padding_of_fsdp1, 3) for value in values})
    return Outcome(
        only_if(
            "the implementation promises it and its optimizer keeps a zero with gradient zero",
            under_it=nonzero == 0 and looked > 0,
            otherwise=shifted == 0 and theirs in ([], [0.0]),
        ),
        f"{len(counts)} optimizers, weight decay, momentum and noise, W = 4: {nonzero} of {looked} padding elements"
        " seen at"
        f" the three moments are not zero; an optimizer that moves zeros leaves {shifted}; FSDP1 holds {theirs} in"
        " its padding",
    )


def _padding(lab: Lab, make: Any) -> tuple[int, int]:
    """(padding elements seen at the three moments on all ranks, those that are not zero)."""

    def body(rank: int) -> tuple[int, int]:
        model = toys.flat(toys.network())
        seen: list[Tensor] = []

        def look(moment: str = "after_reduce") -> None:
            if moment == "after_reduce":
                for buffer in (buffer for unit in model.units for buffer in unit.buffers):
                    held = [buffer.shard, buffer.shard.grad]
                    seen.extend(t.detach()[buffer.padding].clone() for t in held if t is not None)

        noisy = toys.privacy(1.0, noise_multiplier=1.0, noise=impl("noise.gaussian").seeded(0))
        trainer = toys.trainer(model, optimizer=make, notify=look, privacy=noisy)
        look()
        for _ in range(3):
            trainer.step(toys.micro_batches([toys.share(rank, 4)]))
            look()
        return sum(len(part) for part in seen), sum(int(part.count_nonzero()) for part in seen)

    found = lab.ranks(body, 4)
    return sum(seen for seen, _ in found), sum(wrong for _, wrong in found)


def _padding_of_fsdp1(rank: int) -> list[float]:
    """What lies in the storage behind this rank's parameters and belongs to none of them."""
    module = nn.Sequential(nn.Linear(3, 3)).float()  # 9 + 3 elements, aligned, on 3 ranks
    wrapped = FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))
    own = [parameter.detach() for parameter in wrapped.parameters()]
    storage = own[0].untyped_storage()
    whole = torch.empty(0).set_(storage)
    free = torch.ones(len(whole), dtype=torch.bool)
    for part in own:
        free[part.storage_offset() : part.storage_offset() + part.numel()] = False
    return [float(value) for value in whole[free]]


_MODEL = ModelSpec((LayerSpec(3, bias=True, activation="relu"), LayerSpec(2)), features=3, units=(1,))


@claim("B4'", "Padding is never read: NaN put into it before an operation that does not read it changes nothing.")
def padding_is_never_read(lab: Lab) -> Outcome:
    """The same trainings with and without NaN in the padding, plain, clipping each sample and clipping globally."""
    run, changed, poisoned = lab.run("reference"), 0, 0
    adam = OptimizerSpec("adamw", weight_decay=0.5)
    steps = [
        StepSpec(steps=3, normaliser=4),
        StepSpec(steps=3, normaliser=4, optimizer=adam),
        StepSpec(steps=3, normaliser=4, clipping="exact"),
        StepSpec(steps=3, normaliser=4, max_grad_norm=1.0),
    ]
    worlds = (2, 3, 4)
    for step in steps:
        for world_size in worlds:
            case = TrainingCase(_MODEL, MeshSpec(dp_shard=world_size), BatchLayout("contiguous", 5), step)
            clean = run(case, observe=("shards",))
            dirty = run(case, observe=("shards",), probes=(probes.poison_padding, probes.padding))
            pairs = zip(clean.ranks, dirty.ranks, strict=True)
            changed += sum(
                toys.different(a.params, b.params)
                for one, two in pairs
                for a, b in zip(one.steps, two.steps, strict=True)
            )
            seen = [value for rank in dirty.ranks for _, _, value in probes.padding.saw(rank)]
            shown = [tensor for value in seen for tensor in value.values()]
            poisoned += sum(int(tensor.isnan().sum()) for tensor in shown)
    return Outcome(
        verdict(changed == 0 and poisoned > 0),
        f"{len(steps) * len(worlds)} trainings of 3 steps, NaN seen in {poisoned} padding elements: {changed}"
        " parameter elements"
        " differ from those of the run without NaN",
    )
