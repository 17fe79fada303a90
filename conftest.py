"""For a bare checkout: the plugin that an installed fsdpcheck brings by its entry point, under the same name.

And which laws the project's own suite asks of both references by day: what they share is asked of one.
"""

import gc
import os
import signal
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; ranks are many, cores are few
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # tests are of ranks on the CPU; of GPUs are those of `tox -e gpu`

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts its background jobs so; tests interrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # to import and to collect makes no garbage, and to look for it took a fifth of the time

pytest_plugins = ["fsdpcheck.pytest_plugin", "pytester"]

_LONG = (
    *("samplers.poisson-room", "samplers.poisson-law", "kernels.order", "privacy.canary"),
    *("features.prefetch", "features.no-gather", "features.private-compiled", "features.compiled"),
    *("noise.padding", "noise.scale", "privacy.replayed", "clipping.one-row", "precision.tf32-norms"),
    *("noise.independent", "kernels.definition", "privacy.accounted", "training.steps-counted"),
    *("noise.once", "noise.world", "privacy.noise", "privacy.collectives", "state.resharded", "state.noise"),
    *("invariance.private-repeated", "invariance.private-world", "training.tied-apart", "training.thawed"),
    *("lifecycle.memory", "lifecycle.interrupted", "samplers.poisson-seeded"),
)
"""Laws whose few cases take seconds; the main job has them."""
_BY_DAY = {
    "reference_fsdp2": (
        *("training.plain", "training.gradients", "training.private-clipped", "collectives.plain", "shards."),
        *("features.ignored", "features.broadcast"),
        *("lifecycle.parameter-hooks", "norms.one-axis", "privacy.ignored"),
    ),
    "fully_shard": (
        *("training.plain", "training.gradients", "collectives.plain", "global-norm.returned"),
        *("features.divide-factor", "features.state-dict"),
    ),
    "fsdp1": ("training.plain", "collectives.plain", "global-norm."),
}
"""The laws that each of them meets by day, by how their names begin; the reference meets all."""


def pytest_configure(config: pytest.Config) -> None:
    """Draw without the constants of source files, so that an edit anywhere changes no test; to find them takes 3 s."""
    from fsdpcheck.compat.hypothesis_private import without_local_constants

    without = without_local_constants()
    without.__enter__()
    config.add_cleanup(lambda: without.__exit__(None, None, None))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``: one more than there are cores, for a test of ranks or of a command waits for another process."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """From here on tests run, and garbage is looked for among what they make, not among torch's own modules."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By day each law meets the reference if it promises it, and of others what is most their own.

    Whose parts hold a parameter decides its norm, so those laws meet FSDP2's too. Of the features of fully_shard by day
    those that change what is reduced. The main job has every law on every one, and the night.
    """
    for item in items:
        law = getattr(getattr(item, "obj", None), "law", None)
        if law is None:
            continue
        adapter = next((name for name in _BY_DAY if item.name.endswith(f"-{name}]")), None)
        if law.name.startswith(_LONG) or (adapter is not None and not law.name.startswith(_BY_DAY[adapter])):
            item.add_marker(pytest.mark.nightly)
