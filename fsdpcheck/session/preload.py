"""What a worker of sessions needs, imported and computed; the zygote has it done once for all that it forks."""

from __future__ import annotations

import importlib
import pkgutil

from fsdpcheck import checks
from fsdpcheck.loading import provenance
from fsdpcheck.session import run as run

for _module in pkgutil.iter_modules(checks.__path__):  # what chapters of laws import; they themselves are the plan's
    importlib.import_module(f"{checks.__name__}.{_module.name}")
provenance.own()
