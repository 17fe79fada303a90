"""Data parallelism by other conventions than the default, each once declared and once not, and DDP used wrongly."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapter import ArithmeticRule, Batch, FactorRule, Features, NormRule, Setup
from fsdpcheck.adapters.builtin import ddp
from fsdpcheck.adapters.training_loop import TrainingLoop

ACCEPTS = ddp.adapter.features.accepts - {"real", "tf32", "evaluation", "inference-mode"}


class Trainer:
    """Every rank has the whole model. ``averaging`` and ``zeros`` are how this one does it."""

    def __init__(self, model: nn.Module, setup: Setup, averaging: str, zeros: bool) -> None:
        self.model, self.setup, self.averaging, self.zeros = model, setup, averaging, zeros
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = setup.optimizer(self.trained.values())

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        for number, micro in enumerate(batch.micro_batches):
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            (losses.sum() * self.scale(len(micro.indices), batch)).backward()
            if self.setup.step.sync_every or number == len(batch.micro_batches) - 1:
                self.reduce()
        self.optimizer.step()

    def scale(self, count: int, batch: Batch) -> float:
        return 1 / max(count, 1) if self.setup.step.reduction == "mean" else batch.loss_scale

    def reduce(self) -> None:
        """What was averaged is averaged again, as DDP does: equal on all ranks, it stays as it is, but for rounding."""
        world = self.setup.world_size
        for parameter in self.trained.values():
            if parameter.grad is None:
                if self.zeros:
                    parameter.grad = torch.zeros_like(parameter)
                continue
            inverse = parameter.grad.new_ones(()) / world
            if self.averaging == "divided before":
                parameter.grad /= world
            elif self.averaging == "multiplied before":
                parameter.grad *= inverse
            dist.all_reduce(parameter.grad)
            if self.averaging == "divided after":
                parameter.grad /= world
            elif self.averaging == "multiplied after":
                parameter.grad *= inverse

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: value.grad if value.grad is None else value.grad.clone() for name, value in self.trained.items()}


class Convention:
    def __init__(self, how: str = "divided after", zeros: bool = False, **declared: str) -> None:
        self.name, self._averaging, self._zeros = how, how, zeros
        rule = ArithmeticRule(**declared)  # type: ignore[arg-type]
        observables = frozenset({"params", "grads"})
        self.features = Features(frozenset({"plain"}), ACCEPTS, observables, arithmetic=rule)  # type: ignore[arg-type]

    def build(self, model: nn.Module, setup: Setup) -> Trainer:
        return Trainer(model, setup, self._averaging, self._zeros)


after = Convention()
divided_before, multiplied_before, multiplied_after = (
    Convention(name) for name in ("divided before", "multiplied before", "multiplied after")
)
divided_before_declared, multiplied_before_declared, multiplied_after_declared = (
    Convention(name, averaging="before") for name in ("divided before", "multiplied before", "multiplied after")
)
zeros, zeros_declared, none_declared_zeros = (
    Convention(zeros=True),
    Convention(zeros=True, unused="zero"),
    Convention(unused="zero"),
)


class _Wrong(TrainingLoop):
    """DDP whose user makes a mistake."""

    mistake = ""

    def reduces(self, number: int, last: int) -> bool:
        return self.setup.step.sync_every or (number == last and self.mistake != "never synced")

    def accumulate(self, batch: Batch) -> None:
        super().accumulate(batch)
        for parameter in self.model.parameters() if self.mistake == "divided twice" else ():
            if parameter.grad is not None:
                parameter.grad /= self.setup.world_size


class _WrongDDP(ddp.DistributedDataParallelAdapter):
    def __init__(self, mistake: str) -> None:
        super().__init__(mistake)
        self._loop = type("Wrong", (_Wrong,), {"mistake": mistake})

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        made: TrainingLoop = self._loop(ddp.DistributedDataParallel(model), setup, named=model)
        return made


never_synced, divided_twice = _WrongDDP("never synced"), _WrongDDP("divided twice")


class Clipping(Trainer):
    """One sample at a time; norms with an eps of ``rule`` inside or outside their root."""

    rule = NormRule()

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        dtype = next(iter(self.trained.values())).dtype
        total = {name: torch.zeros_like(value) for name, value in self.trained.items()}
        norms, factors = [torch.zeros(0, dtype=dtype)], [torch.zeros(0, dtype=dtype)]
        for micro in batch.micro_batches:
            for row in range(len(micro.indices)):
                losses = self.setup.loss(self.model(micro.inputs[row : row + 1]), micro.targets[row : row + 1])
                own = torch.autograd.grad(losses.sum(), list(self.trained.values()))
                squared = torch.stack([gradient.square().sum() for gradient in own]).sum()
                norm = (squared + 1e-3).sqrt() if self.rule.place == "inside" else squared.sqrt() + 1e-3
                factor = (norm.reciprocal() * self.setup.clip_norm).clamp(max=1.0)
                norms.append(norm[None]), factors.append(factor[None])
                for name, gradient in zip(self.trained, own, strict=True):
                    total[name] += gradient * factor * batch.loss_scale
        for name, value in self.trained.items():
            value.grad = total[name]
        self.found = torch.cat(norms), torch.cat(factors)
        self.reduce()
        self.optimizer.step()

    def norms(self) -> Tensor:
        return self.found[0]

    def factors(self) -> Tensor:
        return self.found[1]


class Clipped:
    name = "clipped"

    def __init__(self, place: str, declared: bool) -> None:
        self._trainer = type("Placed", (Clipping,), {"rule": NormRule(1e-3, place)})  # type: ignore[arg-type]
        rule = FactorRule(expression="reciprocal", norm=self._trainer.rule if declared else NormRule())
        traits = frozenset({"bias", "ragged", "float32", "sequence", "uneven-rows", "rows<ranks", "root-parameters"})
        self.features = replace(
            after.features,
            promises=frozenset({"private", "exact-factors"}),
            accepts=traits,
            observables=frozenset({"params", "grads", "norms", "factors"}),
            factor=rule,
        )

    def build(self, model: nn.Module, setup: Setup) -> Trainer:
        made: Trainer = self._trainer(model, setup, "divided after", False)
        return made


inside, outside = Clipped("inside", True), Clipped("outside", True)
inside_undeclared, outside_undeclared = Clipped("inside", False), Clipped("outside", False)
