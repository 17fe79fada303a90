"""Forgets to average over ranks, and turns anomaly detection on in each step, as training scripts do."""

from __future__ import annotations

import torch

from fsdpcheck.adapters.contract import Batch
from tests.toys.averaging import Averaging, Trainer


class Anomalous(Trainer):
    def step(self, batch: Batch) -> None:
        torch.autograd.set_detect_anomaly(True)
        super().step(batch)

    def average(self) -> None: ...


adapter = Averaging("anomalous", Anomalous)
