"""What every rank runs, on every engine: build the model a case describes, shard it, take its steps, record.

Moments: after_init, then in each step those the implementation announces (Setup.notify), then after_step.
Probes look at the model before it is sharded, and at the trainer at these moments: see probe.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdpcheck import adapters
from fsdpcheck.adapters.contract import Adapter, Batch, MicroBatch, Observed, Setup, Trainer
from fsdpcheck.case import KernelCase, SamplerCase, TrainingCase
from fsdpcheck.case.training import Evaluation
from fsdpcheck.compat import groups_private
from fsdpcheck.errors import AdapterError, Interrupted, explain
from fsdpcheck.execution import RankResult, RunRequest, StepRecord
from fsdpcheck.execution.pieces import Shown
from fsdpcheck.program import kernels as kernel_program
from fsdpcheck.program import nonfinite_samples
from fsdpcheck.program import samplers as sampler_program
from fsdpcheck.program.allocations import Allocations
from fsdpcheck.program.lines import Lines
from fsdpcheck.program.methods import methods_for
from fsdpcheck.program.observables import Showing
from fsdpcheck.program.optimizers import Optimizers
from fsdpcheck.program.probe import Watch
from fsdpcheck.program.values import Values
from fsdpcheck.workload import batches, clip_groups, models
from fsdpcheck.workload.optimizer import CACHE_LINE, project_

NO_VALUE = 0.7
"""What every parameter is before a checkpoint is loaded. Not NaN: where that is refused nothing would be compared."""


def rank_program(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    """Run ``request`` as ``rank`` of an initialised default group of world_size ranks, filling ``result`` as it goes.

    Raises whatever the implementation raises, and AdapterError for what breaks the adapter protocol.
    """
    with ExitStack() as stack:
        if request.memory not in ("poison", "zeros"):
            stack.enter_context(Allocations(result.allocations, request.memory.removeprefix("zeros at ")))
        if request.lines:
            stack.enter_context(Lines(result.lines))
        if request.values:
            stack.enter_context(Values(result))
        _run(request, rank, device, result)


def _run(request: RunRequest, rank: int, device: torch.device, result: RankResult) -> None:
    adapter = adapters.load(request.adapter)
    match request.case:
        case TrainingCase() as case:
            _train(request, case, adapter, rank, device, result)
        case SamplerCase() as case:
            take = sampler_program.draw if request.records is None else partial(sampler_program.build, request.records)
            take(case, adapter, rank, result)
        case KernelCase() as case:
            kernel_program.compute(case, adapter, result)


def _train(
    request: RunRequest, case: TrainingCase, adapter: Adapter, rank: int, device: torch.device, result: RankResult
) -> None:
    watch, showing = Watch(request, rank, result), Showing(adapter, case.mesh, rank)
    made = Optimizers(case, watch)
    setup = _setup(request, rank, device, watch, made)
    if case.step.rebuilds:
        _rehearse(case, adapter, setup, _on(device, _batch(request, 0, rank)))
    trainer = _built(request, adapter, setup, made, watch, models.build(case))
    result.initial = {} if request.late else showing.named(trainer.parameters(), "parameters")
    result.calls_until_initial = groups_private.calls_so_far()
    watch.moment("after_init", trainer)
    for step in range(case.step.steps):
        watch.step, loaded = step, None
        batch = nonfinite_samples.batch_of(_batch(request, step, rank), request)
        if request.load_from and step:
            trainer = _built(request, adapter, setup, made, watch, _without_values(models.build(case)))
            # what this gathers is old behind the load
            _evaluated(case.step.evaluates, trainer, showing, _on(device, batch))
            cast(Observed, trainer).load(f"{request.load_from}/{step - 1}")
            loaded = showing.named(trainer.parameters(), "parameters")
        outputs = _evaluated(case.step.evaluates, trainer, showing, _on(device, batch))
        if case.step.thaws and (step == 1 or loaded is not None):
            cast(Observed, trainer).thaw()
        if case.step.refreezes and (step == 2 or (step > 2 and loaded is not None)):
            cast(Observed, trainer).freeze(models.frozen(case))
        with nonfinite_samples.refusal(request, result, lambda trainer=trainer: _held(trainer, made)):  # type: ignore[misc]
            _take(trainer, _on(device, batch), watch)
        unseen = request.late and step < case.step.steps - 1
        result.steps.append(StepRecord({}) if unseen else _record(trainer, showing, request))
        result.steps[-1].loaded, result.steps[-1].outputs = loaded, outputs
        watch.moment("after_step", trainer)
        if case.arithmetic.project:
            held = _held(trainer, made)
            result.steps[-1].hidden = _hidden(result.steps[-1].params, held)
            _project(held, trainer, adapter, case)
        if request.save_to:
            result.steps[-1].saved = showing.named(trainer.parameters(), "parameters")
            cast(Observed, trainer).save(f"{request.save_to}/{step}")


def _rehearse(case: TrainingCase, adapter: Adapter, setup: Setup, batch: Batch) -> None:
    """Build and train another model for a step, which nobody looks at; what comes after it is as if it had not been."""
    optimizer, model = Optimizers(case, None), models.build(case).to(setup.device)
    optimizer.begin(model)
    adapter.build(model, replace(setup, optimizer=optimizer, notify=lambda moment, trainer: None)).step(batch)


def _evaluated(context: Evaluation, trainer: Trainer, showing: Showing, batch: Batch) -> Tensor | None:
    """What the trainer gives of the first micro-batch between two steps; None where nobody asks."""
    if context == "no":
        return None
    with torch.inference_mode(context == "inference_mode"):
        outputs = cast(Observed, trainer).evaluate(batch.micro_batches[0].inputs)
    return showing.tensor(outputs.clone(), "evaluate")


def _built(
    request: RunRequest,
    adapter: Adapter,
    setup: Setup,
    made: Optimizers,
    watch: Watch,
    model: nn.Module,
) -> Trainer:
    """A trainer of ``model``."""
    made.begin(model)
    if setup.device.type != "cpu":  # where it is built; to walk through it for nothing costs 3 % of a small case
        model.to(setup.device)
    if request.training.arithmetic.numbers == "real":
        _watch_placement(model, watch.result.placement)
    watch.model(model)
    watch.loss(setup.loss)
    return _checked(adapter.build(model, setup), adapter, request, made)


@torch.no_grad()
def _without_values(model: nn.Module) -> nn.Module:
    """The model with values that no training of a case has: what a checkpoint does not bring back is seen."""
    for parameter in model.parameters():
        parameter.fill_(NO_VALUE)
    return model


def _take(trainer: Trainer, batch: Batch, watch: Watch) -> None:
    """One step; once more if a probe has interrupted it. What is raised by others stands."""
    watch.begin_step()
    try:
        trainer.step(batch)
    except Interrupted:
        if not watch.has_interrupted:
            raise
        watch.has_interrupted = False
        trainer.step(batch)
    finally:
        watch.in_step = False


def _held(trainer: Trainer, made: Optimizers) -> list[Tensor]:
    """What the trainer says it holds, or else what the optimizers it was given update."""
    if callable(getattr(trainer, "local_tensors", None)):
        return list(cast(Observed, trainer).local_tensors())
    return made.updated()


def _project(held: list[Tensor], trainer: Trainer, adapter: Adapter, case: TrainingCase) -> None:
    """Project what the rank holds. Raises AdapterError for copies: training would go on from the real parameters."""
    project_(held, case)
    if not callable(getattr(trainer, "local_tensors", None)):
        return
    again = cast(Observed, trainer).local_tensors()
    if any(one.data_ptr() != two.data_ptr() for one, two in zip(held, again, strict=True)):
        what = f"local_tensors() of adapter {adapter.name!r} returned copies"
        got = "tensors at other addresses in a second call"
        wanted = "the live tensors this rank trains, which are changed in place between steps"
        then = "return them without clone(), or do not accept 'project'"
        raise AdapterError(explain(what, got=got, wanted=wanted, then=then))


def _hidden(shown: dict[str, Any], held: Iterable[Tensor]) -> str:
    """The first parameter whose whole copy on this rank is not what was shown; "" if none, or if copies are not whole.

    An implementation that keeps whole parameters on every rank may show rank 0's everywhere. Then a rank that drifts
    would be healed by the projection, and never be seen.
    """
    own = list(held)
    if any(isinstance(value, Shown) for value in shown.values()):
        return ""
    by_shape: dict[torch.Size, list[str]] = {}
    for name, value in shown.items():
        by_shape.setdefault(value.shape, []).append(name)
    if sorted(tensor.shape for tensor in own) != sorted(value.shape for value in shown.values()):
        return ""
    for tensor in own:
        names = by_shape[tensor.shape]  # which of equally shaped ones it is, nobody says
        same = next((name for name in names if _same(tensor.detach().to("cpu"), shown[name])), None)
        if same is None:
            return names[0]
        names.remove(same)
    return ""


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _watch_placement(model: nn.Module, placement: dict[str, int]) -> None:
    """Note where the parameters of each layer lie whenever it is called, modulo a cache line."""
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if names:
            module.register_forward_pre_hook(functools.partial(_note_placement, placement, path, names))


def _note_placement(placement: dict[str, int], path: str, names: list[str], module: nn.Module, _: object) -> None:
    for name in names:
        placement[f"{path}.{name}"] = getattr(module, name).data_ptr() % CACHE_LINE


def _batch(request: RunRequest, step: int, rank: int) -> Batch:
    return batches.batch(request.training, step, rank, request.instrument, averages=request.averages)


def _on(device: torch.device, batch: Batch) -> Batch:
    micro = [MicroBatch(m.inputs.to(device), m.targets.to(device), m.indices) for m in batch.micro_batches]
    return Batch(tuple(micro), batch.loss_scale)


def _setup(request: RunRequest, rank: int, device: torch.device, watch: Watch, made: Optimizers) -> Setup:
    case = request.training
    loss = models.loss_for(case)
    loss.scale *= request.loss_times
    return Setup(
        rank=rank,
        world_size=case.world_size,
        mesh=case.mesh,
        step=case.step,
        replicated=case.layout.kind == "replicated",
        replicated_shards=case.layout.kind in ("replicated", "by-replica"),
        units=models.unit_names(case),
        loss=loss,
        clip_norm=request.clip_norm,
        clip_bounds=clip_groups.bounds(case, request.clip_norm),
        optimizer=made,
        device=device,
        notify=watch.moment,
        rate=request.rate,
        seed=case.seed if request.noise_seed is None else request.noise_seed,
        using=frozenset(request.using),
        compile=watch.compile,
        compute=case.arithmetic.compute,
    )


def _checked(trainer: Trainer, adapter: Adapter, request: RunRequest, made: Optimizers) -> Trainer:
    """``trainer``, if it has the methods that this run will call."""
    needed = list(dict.fromkeys(methods_for(request)))
    refuses = bool(request.spoiled) and request.training.step.private
    if (request.training.arithmetic.project or refuses) and not made.made and "local_tensors" not in needed:
        needed.append("local_tensors")
    missing = [name for name in needed if not callable(getattr(trainer, name, None))]
    if missing:
        what = f"the trainer that adapter {adapter.name!r} built lacks a method"
        got = f"{type(trainer).__qualname__} without {', '.join(missing)}"
        then = "add it (see fsdpcheck.adapter.Observed), or list neither its observable nor its promise"
        raise AdapterError(explain(what, got=got, wanted=", ".join(needed), then=then))
    return trainer


def _record(trainer: Trainer, showing: Showing, request: RunRequest) -> StepRecord:
    observed, wanted = cast(Observed, trainer), request.observe
    record = StepRecord(showing.named(trainer.parameters(), "parameters"))
    if "grads" in wanted:
        record.grads = showing.named(_that_are(observed.gradients()), "gradients")
    if "norms" in wanted:
        record.norms = showing.tensor(observed.norms(), "norms")
    if "factors" in wanted:
        record.factors = showing.tensor(observed.factors(), "factors")
    if "grad_norm" in wanted:
        record.grad_norm = showing.tensor(observed.grad_norm(), "grad_norm")
    if "accounted" in wanted:
        record.accounted = [(float(told), float(rate), int(steps)) for told, rate, steps in observed.accounted()]
    return record


def _that_are(gradients: object) -> object:
    """Without those that are None: such a parameter has no gradient, as one that is not named."""
    if not isinstance(gradients, Mapping):
        return gradients
    return {name: value for name, value in gradients.items() if value is not None}
