"""Independence of samples: whether a sample's loss depends on it alone, asked once before the first private step.

A sample's gradient exists only if no other sample's row reaches its loss. Where one does - a normalisation over the
batch, a loss that compares samples, an axis that is not the samples' - the norms are those of mixtures, clipping bounds
nobody's influence, and nothing in the step would show it. So the model and the loss are run on a few made-up rows, once
as they are and once with NaN in the first one: whatever else becomes NaN depends on it. The rows have the shapes of the
inputs and none of their values, so every rank runs the same and finds the same, also one without samples.

A layer that is given sample 0 in another row is refused too, even if no loss shows it: norms go by rows.

The loss is then asked about targets, on the made-up outputs and on these plus 1, 2, ..., for a zero may hide a target,
and equal logits do: with another target of sample 0 - a class that may be left out, or another; real ones NaN too,
which not every function lets through - every other loss must stay as it is. What it cannot take, it is not asked.

Not seen: mixing of integers (rows of them are poisoned where real numbers are first made of them), an order of samples
that depends on their values, values that NaN does not pass through, and backwards that mix what forwards keep apart.
Seen without being there: masked mixing, 0 * NaN, as of several samples packed into one row. Then say
``Privacy(independence="trust")``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import norms
from ..norms import fallback
from ..sharding.nested_tensors import tensors_in
from ..sharding.protocol import Sharded
from .records import Layer

INSTEAD = (
    "take GroupNorm or LayerNorm for a BatchNorm, batch_first=True for an axis of positions, a loss that compares no"
    " samples; or, if it is known that no sample's loss depends on another's row, say Privacy(independence='trust')"
)
OTHER_TARGETS = (-100, -1, 1)
"""Targets besides 0: classes that losses leave out by custom, and one more."""


def refuse_dependent(
    model: Sharded,
    loss: Callable[[Tensor, Tensor], Tensor],
    layers: Sequence[Layer],
    inputs: Tensor,
    targets: Tensor,
    unrecorded: Callable[[], AbstractContextManager[None]],
) -> None:
    """Raise NotImplementedError, on all ranks, naming where rows meet; ``inputs`` and ``targets`` [b, ...], b >= 0.

    Two forwards, no backward: as many collectives as two forwards. Of integers four before it raises: a constant of
    the model that happens to have as many entries as there are made-up rows is poisoned as well, and another number of
    rows tells it from samples. Buffers and random states are left as they were.
    The poisoned one is ``unrecorded``; of the other the caller has to drop what was recorded.
    """
    refusal = ""
    for rows, more in made_up(inputs):
        refusal = _asked(model, loss, layers, rows, more, targets, unrecorded)
        if not refusal or inputs.is_floating_point():
            break
    if refusal:
        raise NotImplementedError(refusal)


def _asked(
    model: Sharded,
    loss: Callable[[Tensor, Tensor], Tensor],
    layers: Sequence[Layer],
    rows: Tensor,
    more: Tensor,
    targets: Tensor,
    unrecorded: Callable[[], AbstractContextManager[None]],
) -> str:
    """Where samples meet among ``rows`` and ``more`` made-up ones, in words; "" if they do not."""
    try:
        with _left_as_it_was(model.module, rows):
            clean, before = _run(model, loss, layers, rows, targets, poisoned=False)
        with _left_as_it_was(model.module, rows), unrecorded():
            poisoned, after = _run(model, loss, layers, more, targets, poisoned=True)
    except Exception as error:
        error.add_note(
            f"when asked whether samples mix, with {len(rows)} made-up rows of shape {tuple(rows.shape[1:])} before the"
            " first private step; for a model that cannot run on such rows say Privacy(independence='trust')"
        )
        raise
    if clean is not None and poisoned is not None and _reached(clean, poisoned):
        return f"{after.met or 'the loss'}: it mixes the samples of a batch; {INSTEAD}"
    for (where, was), (_, now) in zip(before.at_layers, after.at_layers, strict=False):
        if now and not was:
            return (
                f"{where} is given sample 0 in a row of another sample, so that norms of its rows are not those of"
                " samples, even if no loss shows it, as where samples are put in another order and back; keep the order"
                " of samples, or, if row i is known to be sample i's at every layer, say Privacy(independence='trust')"
            )
    return ""


def made_up(inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Two pairs [n, ...] and [m, ...]: equal rows shaped like those of ``inputs``, see ``norms.fallback``.

    All n and m are different, the first numbers from 2 that none of the other axes has, so that they cannot be taken
    for the samples'. A pair has two, so that a layer with as many rows whatever the samples are is seen.
    """
    shape = inputs.shape[1:]
    first, second, third, fourth, *_ = (n for n in range(2, 7 + len(shape)) if n not in shape)
    return [(fallback.made_up(inputs, n), fallback.made_up(inputs, m)) for n, m in ((first, second), (third, fourth))]


def _run(
    model: Sharded,
    loss: Callable[[Tensor, Tensor], Tensor],
    layers: Sequence[Layer],
    rows: Tensor,
    targets: Tensor,
    *,
    poisoned: bool,
) -> tuple[Tensor | None, _Watch]:
    """Losses [n], None if they are not one a sample, and where NaN reached another row."""
    wanted = targets.new_zeros((len(rows), *targets.shape[1:]))
    integers = _Poisoning(len(rows)) if poisoned and not rows.is_floating_point() else nullcontext()
    with _watching(model.module, layers, rows, poisoned) as watch, torch.enable_grad(), integers:
        outputs = model(poison(rows) if poisoned else rows)
        losses = loss(outputs, wanted)
    model.reshard()
    if not isinstance(losses, Tensor) or losses.shape != (len(rows),):
        return None, watch
    if not poisoned and isinstance(outputs, Tensor) and mixes_targets(loss, outputs.detach(), wanted):
        raise NotImplementedError(
            "the loss of a sample depends on the targets of others: it mixes the samples of a batch, as where a mean is"
            " over all tokens that count; divide by what is known of the sample alone, or by a constant"
        )
    return losses.detach(), watch


def mixes_targets(loss: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> bool:
    """Whether another target of sample 0 changes the loss of another sample.

    Asked on the CPU, where a class that does not exist is an error and not the end of the process.
    """
    values = (float("nan"), *OTHER_TARGETS) if targets.is_floating_point() else OTHER_TARGETS
    ramp = torch.arange(1, 1 + outputs[0].numel(), dtype=outputs.dtype).reshape(outputs.shape[1:])
    for given, value in itertools.product((outputs.cpu(), outputs.cpu() + ramp), values):
        changed = targets.index_fill(0, torch.zeros(1, dtype=torch.int64, device=targets.device), value)
        try:
            with torch.random.fork_rng(devices=[]):
                before = loss(given, targets.cpu())
            with torch.random.fork_rng(devices=[]):
                after = loss(given, changed.cpu())
        except (RuntimeError, IndexError, ValueError):
            continue
        if not torch.equal(before[1:].nan_to_num(), after[1:].nan_to_num()) or _reached(before, after):
            return True
    return False


def poison(rows: Tensor) -> Tensor:
    """``rows`` with NaN all over the first one; integers as they are."""
    if not rows.is_floating_point():
        return rows
    return rows.index_fill(0, torch.zeros(1, dtype=torch.int64, device=rows.device), float("nan"))


def refuse_rows(layer: str, rows: int, samples: int) -> NoReturn:
    """Raise NotImplementedError: ``layer`` gives ``rows`` rows for ``samples`` samples: nobody tells them apart."""
    next_ = "transpose before and after it, or say batch_first=True"
    if rows == 1:
        next_ = (
            "give it one row a sample, such as positions.expand(len(inputs), -1), for one row is all samples' at once"
        )
    raise NotImplementedError(
        f"{layer} gives {rows} rows for {samples} samples: the first axis of every layer's input and output must be the"
        f" samples; {next_}"
    )


def _reached(clean: Tensor, poisoned: Tensor) -> bool:
    """Whether NaN is in a loss of another sample, and was not when all rows were equal; there may be more of them."""
    before = clean[1:].isnan()
    before = torch.cat([before, before[:1].expand(len(poisoned) - len(clean))])
    return bool((poisoned[1:].isnan() & ~before).any())


class _Watch:
    """What modules are given and give, in the order in which they run.

    ``met``: where NaN first reached another row, "" for nowhere; ``at_layers``: whether it had before each layer ran.
    """

    def __init__(self, count: int, poisoned: bool) -> None:
        self.count, self.poisoned, self.met = count, poisoned, ""
        self.at_layers: list[tuple[str, bool]] = []

    def before(self, where: str, counted: bool, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if counted:
            self.at_layers.append((where, any(self._mixed(value) for value in inputs)))
        if self.poisoned and not self.met and any(self._mixed(value) for value in inputs):
            self.met = f"the forward that calls {where}, before it does"

    def after(self, where: str, counted: bool, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(first, Tensor):
            return None
        if counted and len(first) != self.count:
            refuse_rows(where, len(first), self.count)
        if not self.poisoned:
            return None
        if not self.met and self._mixed(first):
            self.met = f"{where} is a {norms.layer_type(module).__name__}"
        return poison(first) if self._begins(inputs, first) and first is output else None

    def _mixed(self, value: Any) -> bool:
        return self._rows(value) and bool(value[1:].isnan().any())

    def _begins(self, inputs: tuple[Any, ...], output: Tensor) -> bool:
        """Whether a module makes real numbers of rows of integers."""
        given = [value for value in inputs if isinstance(value, Tensor)]
        return self._rows(output) and bool(given) and not any(value.is_floating_point() for value in given)

    def _rows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0 and len(value) == self.count


class _Poisoning(TorchFunctionMode):
    """Poisons what is first made of rows of integers, in a module or between modules."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or not result.is_floating_point() or result.shape[:1] != (self.count,):
            return result
        real = [value.is_floating_point() for value in tensors_in((args, kwargs)) if value.shape[:1] == (self.count,)]
        return poison(result) if real and not any(real) else result


@contextmanager
def _watching(module: nn.Module, layers: Sequence[Layer], rows: Tensor, poisoned: bool) -> Iterator[_Watch]:
    watch, counted = _Watch(len(rows), poisoned), {id(layer.module) for layer in layers}
    with ExitStack() as hooks:
        for name, child in module.named_modules():
            where = name or "(root)"
            before = child.register_forward_pre_hook(partial(watch.before, where, id(child) in counted), prepend=True)
            after = child.register_forward_hook(partial(watch.after, where, id(child) in counted), prepend=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield watch


@contextmanager
def _left_as_it_was(module: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Buffers and random states are the same afterwards."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
            yield
    finally:
        for buffer, value in kept:
            buffer.data.copy_(value)
