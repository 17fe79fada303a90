"""Opacus' ghost clipping over FSDP2 as its own examples have it (fsdp_example.py, fsdp_llama3.py).

FSDP2Wrapper around every layer, an ordinary optimizer, make_private, then zero_grad, forward, criterion, backward,
step; virtual steps are signalled as its BatchMemoryManager signals them, and its reminders (secure RNG, backward hooks
of a first layer) left out. Noise is that of the case, from a generator seeded alike on all ranks. What is promised of
it, and what it gets wrong, is in opacus.py. Tried with opacus 1.6.0.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, cast

import torch
from opacus import PrivacyEngine  # type: ignore[import-untyped,import-not-found,unused-ignore]
from opacus.utils.fsdp_utils import FSDP2Wrapper  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fsdpcheck.adapters.contract import Batch, Setup
from fsdpcheck.adapters.training_loop import TrainingLoop


class Loop(TrainingLoop):
    """Opacus' documented training loop, one logical batch at a time."""

    model: Any
    optimizer: Any
    criterion: Any
    engine: Any

    def step(self, batch: Batch) -> None:
        self._norms, self._factors, last = list[Tensor](), list[Tensor](), len(batch.micro_batches) - 1
        with warnings.catch_warnings(action="ignore"):
            for number, micro in enumerate(batch.micro_batches):
                self.optimizer.signal_skip_step(do_skip=number < last)
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(micro.inputs), micro.targets)
                self.setup.notify("after_forward", self)
                loss.backward()
                self.note()
                self.optimizer.step()

    def note(self) -> None:
        """Norms and factors of a micro-batch, behind its backward."""
        self._factors.append(self.model.get_clipping_coef().detach().clone())
        self._norms.append(self.model.per_sample_gradient_norms.detach().clone())

    def norms(self) -> Tensor:
        return torch.cat(self._norms)

    def factors(self) -> Tensor:
        return torch.cat(self._factors)


class GhostFsdp:
    """Every layer a unit of its own: FSDP2Wrapper decides, ``Setup.units`` has no say.

    ``reduction`` is Opacus' word for how it normalises. "mean" (its default): FSDP averages the ranks' clipped sums,
    the optimizer divides by ``expected_batch_size``, which is *per worker* (a comment in make_private), so
    N = W * expected_batch_size. "sum": documented as no division at all, so what it sums a user divides by N.
    """

    mode, loop = "ghost_fsdp", Loop
    reduction: Literal["mean", "sum"] = "mean"

    def parallel(self, model: nn.Module, setup: Setup) -> nn.Module:
        """``model`` made parallel, before it is made private."""
        module: Any = FSDP2Wrapper(model)
        module.set_reshard_after_forward(setup.mesh.reshard_after_forward)  # the wrapper has no such option
        return cast(nn.Module, module)

    def build(self, model: nn.Module, setup: Setup) -> Loop:
        module, loss = self.parallel(model, setup), cast(Any, setup.loss).with_reduction(self.reduction)
        step, engine = setup.step, PrivacyEngine()
        # never iterated: make_private reads N off it, len(dataset) / len(loader), and the rate, 1 / len(loader)
        records = TensorDataset(torch.zeros(int(step.normaliser / setup.rate)))
        with warnings.catch_warnings(action="ignore"):
            private, optimizer, *wrapped = engine.make_private(
                module=module,
                optimizer=setup.optimizer(module.parameters()),
                criterion=loss,
                data_loader=DataLoader(records, batch_size=int(step.normaliser)),
                noise_multiplier=step.noise_multiplier,
                noise_generator=torch.Generator(setup.device).manual_seed(setup.seed),
                max_grad_norm=setup.clip_norm,
                loss_reduction=self.reduction,
                poisson_sampling=False,
                grad_sample_mode=self.mode,
            )
        optimizer.secure_mode = step.secure_noise  # PrivacyEngine's own, which sets this, asks for another library
        made = self.loop(private, setup, model, optimizer)
        made.engine, made.criterion = engine, wrapped[0] if len(wrapped) > 1 else loss  # the ghost modes alone wrap it
        return made
