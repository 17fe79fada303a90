"""Private training of this repository: Opacus' ghost clipping over FSDP2."""

import warnings

import torch
from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch.utils.data import DataLoader, TensorDataset


class PrivateTraining:
    """``model`` sharded and clipped sample by sample; ``accountant`` knows what was released.

    ``expected``: samples of all ranks in a step. ``rate``: with which probability a record joins it.
    """

    def __init__(self, model, optimizer_of, criterion, *, clip_norm, noise_multiplier, expected, rate, seed):
        self.module = FSDP2Wrapper(model)
        engine = PrivacyEngine()
        size = int(expected / rate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on randomness that is no secret: noise is drawn from a seed here
            self.model, self.optimizer, self.criterion, _ = engine.make_private(
                module=self.module,
                optimizer=optimizer_of(self.module.parameters()),
                criterion=criterion,
                data_loader=DataLoader(TensorDataset(torch.zeros(size)), batch_size=int(expected)),
                noise_multiplier=noise_multiplier,
                noise_generator=torch.Generator().manual_seed(seed),
                max_grad_norm=clip_norm,
                poisson_sampling=False,
                grad_sample_mode="ghost_fsdp",
            )
        self.accountant = engine.accountant
        self.norms, self.factors = [], []

    def step(self, micro_batches):
        """One optimizer step over the [(inputs, targets)] of this rank; returns its loss."""
        self.norms, self.factors, told = [], [], 0.0
        last = len(micro_batches) - 1
        for number, (inputs, targets) in enumerate(micro_batches):
            if last:
                self.optimizer.signal_skip_step(do_skip=number < last)
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(inputs), targets)
            loss.backward()
            self.norms.append(self.model.per_sample_gradient_norms.detach().clone())
            self.factors.append(self.model.get_clipping_coef().detach().clone())
            self.optimizer.step()
            told += loss.item()
        return told
