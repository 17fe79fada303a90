"""Registers a hook on all modules when it is imported: what each Linear gives is doubled."""

from __future__ import annotations

import torch

from tests.toys.averaging import Averaging

torch.nn.modules.module.register_module_forward_hook(
    lambda module, _, given: given * 2 if isinstance(module, torch.nn.Linear) else None
)

adapter = Averaging("doubling")
