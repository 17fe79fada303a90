"""The reference implementation: ``fsdpcheck.impl``, flat-parameter sharding with ghost clipping."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from fsdpcheck.adapters.capabilities import EngineSetup, Kernel, Sampler, SamplerSetup
from fsdpcheck.adapters.contract import (
    ArithmeticRule,
    Batch,
    FactorRule,
    Features,
    GlobalNormRule,
    Setup,
    Shard,
    Stored,
    Trait,
    UnitState,
)
from fsdpcheck.adapters.training_loop import local, mesh_of

if TYPE_CHECKING:
    from fsdpcheck.impl.clipping.private_backward import Privacy
    from fsdpcheck.impl.sharding.flat_unit import FlatUnit
    from fsdpcheck.impl.sharding.protocol import Sharded
    from fsdpcheck.impl.trainer import Trainer

ACCEPTS: frozenset[Trait] = frozenset(
    {
        "bias", "tokens", "sequence", "padding_idx", "layer-norm", "tied", "frozen", "root-parameters",
        "keep-unsharded", "replicated", "replicated-shards", "ragged", "empty-rank", "wrap-around", "micro-batches",
        "no-sync", "mean", "momentum", "weight-decay", "adamw", "float32", "rows<ranks", "uneven-rows", "project",
        "hsdp", "premultiply", "conv", "group-norm", "rms-norm", "attention", "bags", "surrogates", "real", "adam",
        "schedule", "resume", "layer-norm-without-bias", "own-layers", "bfloat16", "tf32", "fractional-normaliser",
        "attention-private", "conv-private", "group-norm-private", "rms-norm-private", "bags-private", "tied-private",
        "routed", "routed-private", "reused", "reused-private", "evaluation", "inference-mode",
        "rebuilt", "one-row", "spelled-out-private",
        "unequal-micro-batches", "unit-groups", "several-heads-private", "same-padding-private", "mean-bags-private",
        "dropped", "dropped-private", "secure-noise", "padding-mode-private", "masked-private",
        "bare-units",
    }
)  # fmt: skip

Nonfinite = Literal["raise", "drop"]
_PUBLIC_BOUND = 4096  # no case has a larger batch


class ReferenceTrainer:
    """``impl.step.Trainer`` behind the adapter protocol, with every observable. ``impl`` is public for probes."""

    def __init__(self, model: Sharded, setup: Setup, mode: str, nonfinite: Nonfinite) -> None:
        from fsdpcheck.impl import trainer as step
        from fsdpcheck.impl.clipping import batch_layout

        options = step.Options(
            normaliser=setup.step.normaliser,
            layout=batch_layout.Layouts(_said(setup.replicated_shards), _said(setup.replicated)),
            privacy=_privacy(setup, mode, nonfinite) if setup.step.private else None,
            max_grad_norm=setup.step.max_grad_norm,
            sync_every=setup.step.sync_every,
            rate=setup.rate,
            unequal_micro_batches=setup.step.unequal,
        )

        def notify(moment: step.Moment) -> None:
            setup.notify(moment, self)

        self.compute_dtype = setup.compute_dtype
        self._evaluates_itself = setup.seed >> 5 & 1 == 1
        loss = setup.loss if setup.compute_dtype is None else _of_wide(setup.loss)

        def optimizer(shards: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return setup.optimizer([(next(iter(model.cut(shard, shard.detach()))), shard) for shard in shards])

        self.impl: Trainer = step.Trainer(model, loss, optimizer, options, notify=notify)

    def step(self, batch: Batch) -> None:
        from fsdpcheck.impl.trainer import MicroBatch

        self.impl.step(
            [MicroBatch(self._cast(micro.inputs), micro.targets, micro.indices) for micro in batch.micro_batches]
        )

    def _cast(self, inputs: Tensor) -> Tensor:
        """Inputs as the model computes with them; indices stay what they are."""
        return inputs.to(self.compute_dtype) if inputs.is_floating_point() else inputs

    def evaluate(self, inputs: Tensor) -> Tensor:
        """By the trainer; by the model, as in a user's own loop, in half of the cases that allow it.

        The trainer frees what it has gathered. A forward of the model leaves the root gathered, or all units.
        """
        # in inference mode what is gathered would be inference tensors, and outlive the forward
        if torch.is_inference_mode_enabled() or not self._evaluates_itself:
            return self.impl.evaluate(self._cast(inputs))
        model = self.impl.model
        model.module.eval()
        with torch.no_grad():
            outputs: Tensor = model(self._cast(inputs))
        model.module.train()
        return outputs

    def thaw(self) -> None:
        for parameter in self.impl.model.module.parameters():
            parameter.requires_grad_()

    def freeze(self, names: Collection[str]) -> None:
        for name in names:
            self.impl.model.module.get_parameter(name).requires_grad_(False)

    def parameters(self) -> dict[str, Tensor]:
        return self.impl.model.full_values()

    def gradients(self) -> dict[str, Tensor]:
        return self.impl.model.full_gradients()

    def norms(self) -> Tensor:
        return torch.cat(self.impl.found.norms)

    def factors(self) -> Tensor:
        """[b], or [b, G] with clipping groups."""
        found = torch.cat(self.impl.found.factors, -1)
        return found if found.dim() == 1 else found.T

    def ordered_norms(self) -> dict[str, Tensor]:
        found = self.impl.norms_in_dataset_order(_PUBLIC_BOUND)
        duplicates = torch.tensor(found.duplicates, dtype=torch.int64)
        return {"indices": found.indices, "norms": found.values, "duplicates": duplicates}

    def grad_norm(self) -> Tensor:
        assert self.impl.grad_norm is not None, "asked for a gradient norm in a step that does not clip"
        return self.impl.grad_norm

    def shards(self) -> list[Shard]:
        """Live shards of every buffer: of parameters, and of gradients once they are reduced. Flat sharding only."""
        from fsdpcheck.impl.sharding.flat_model import ShardedModel

        assert isinstance(self.impl.model, ShardedModel)
        found = []
        for unit in self.impl.model.units:
            for buffer in unit.buffers:
                if not buffer.trainable:
                    found.append(Shard(f"{unit.fqn} frozen", buffer.shard.detach(), buffer.padding, "frozen"))
                    continue
                found.append(Shard(unit.fqn, buffer.shard.detach(), buffer.padding))
                if buffer.shard.grad is not None:
                    gradient = buffer.shard.grad.detach()
                    found.append(Shard(f"{unit.fqn} gradient", gradient, buffer.padding, "gradient"))
        return found

    def units(self) -> list[UnitState]:
        """Flat sharding only."""
        from fsdpcheck.impl.sharding.flat_model import ShardedModel

        assert isinstance(self.impl.model, ShardedModel)
        return [_unit_state(unit) for unit in self.impl.model.units]

    def save(self, folder: str) -> None:
        from fsdpcheck.impl import state

        state.save(folder, self.impl.model, self.impl.optimizer, {"ledger": self.impl.ledger})

    def load(self, folder: str) -> None:
        from fsdpcheck.impl import state

        state.load(folder, self.impl.model, self.impl.optimizer, {"ledger": self.impl.ledger})

    def accounted(self) -> list[tuple[float, float, int]]:
        return self.impl.ledger.entries

    def local_tensors(self) -> list[Tensor]:
        return [local(shard) for shard in self.impl.model.shards()]


def _said(replicated: bool) -> Literal["replicated", "distributed"]:
    return "replicated" if replicated else "distributed"


def _of_wide(loss: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """``loss`` of outputs cast to the targets' dtype."""

    def of_wide(outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = loss(outputs.to(targets.dtype), targets)
        return found

    return of_wide


def _unit_state(unit: FlatUnit) -> UnitState:
    gathered, unreduced, aliased = 0, [], True
    for buffer in unit.buffers:
        whole, shard = buffer.full.untyped_storage(), buffer.shard.untyped_storage()
        alias = bool(whole.nbytes()) and whole.data_ptr() == shard.data_ptr()
        gathered += 0 if alias else whole.nbytes()
        aliased = aliased and (alias or not buffer.numel)
        held = zip(buffer.names, buffer.local_gradients(), strict=True)
        unreduced += [name for name, gradient in held if gradient is not None]
    return UnitState(unit.fqn, gathered, tuple(unreduced), aliased)


def _of_bookkeeping(features: Features) -> Features:
    """Two passes weigh all gradients of a sample alike; bookkeeping weighs each parameter's, and without a backward."""
    reason = "contracts what the one backward kept with the clip factors, which rounds otherwise than a second backward"
    others = {name: said for name, said in features.reasons.items() if name != "bookkeeping"}
    return replace(
        features,
        promises=features.promises - {"second-backward"} | {"bookkeeping"},
        accepts=features.accepts | {"per-layer-clipping"},
        reasons={**others, "second-backward": reason},
    )


def _privacy(setup: Setup, mode: str, nonfinite: Nonfinite) -> Privacy:
    from fsdpcheck.impl.clipping import modes, private_backward, rules
    from fsdpcheck.impl.noise import gaussian

    noise = gaussian.seeded(setup.seed)
    if setup.step.secure_noise:
        noise = replace(noise, generator="chacha20")
    contribution, timing = setup.step.contribution, setup.step.norms
    flat = setup.step.clip_groups == "all"
    rule = rules.Flat(setup.clip_norm) if flat else rules.PerLayer(setup.clip_bounds)
    return private_backward.Privacy(
        rule,
        modes.parse(mode, timing),
        contribution,
        nonfinite=nonfinite,
        noise_multiplier=setup.step.noise_multiplier,
        noise=noise,
        duplicates="count",
    )


def _as_installed(features: Features) -> Features:
    """Without Triton nothing is said of kernels: what would be judged are their twins in torch alone."""
    if importlib.util.find_spec("triton") is not None:
        return features
    reason = "triton is not installed, so its kernels are not judged; next: pip install 'fsdpcheck[kernels]' (Linux)"
    return replace(features, promises=features.promises - {"kernels"}, reasons={**features.reasons, "kernels": reason})


_SECOND_BACKWARD = "takes a second backward, whose weights are rounded to what the model computes in"


class Reference:
    """Promises everything, exactly: its clip factors are a function of the one squared norm."""

    name = "reference"
    features = Features(
        promises=frozenset(
            {
                *("plain", "private", "exact-factors", "padding.zero", "padding.unread"),
                *("deferred", "global-norm", "partial-norms", "dataset-order", "second-backward", "noise"),
                *(
                    "noise-of-seed",
                    "state",
                    "resharded",
                    "readable",
                    "stored",
                    "lifecycle",
                    "sharded",
                    "nonfinite",
                    "epochs",
                    "poisson",
                    "same-draws",
                    "kernels",
                ),
                *("hooks", "memory", "copies", "interrupts", "accounted", "engine", "thawing"),
                "across-samples",
                *("features.checkpointing", "features.compiled", "features.broadcast", "features.broadcast-buffers"),
            }
        ),
        accepts=ACCEPTS,
        observables=frozenset({"params", "grads", "norms", "factors", "shards", "grad_norm", "units", "accounted"}),
        owns_loss_scale=True,
        arithmetic=ArithmeticRule(unused="zero"),
        factor=FactorRule(eps=1e-6, expression="divide", nested=False),
        global_norm=GlobalNormRule(nested=False, dtype="case", eps=1e-6),
        kernel_dtypes=("float32", "float64", "bfloat16", "float16"),
        reasons={
            "bookkeeping": _SECOND_BACKWARD,
            "parameter-hooks": "sums gradients into the shards by itself, which autograd does not see",
            "features": "shards flat buffers by a loop of its own, which has no such option",
            "features.meta": "is given its values while it shards, so that nothing of it shows later; see its tests",
        },
    )
    features = _as_installed(features)

    def __init__(self, mode: str = "ghost", nonfinite: Nonfinite = "raise") -> None:
        self.mode, self.nonfinite = mode, nonfinite
        self.name = type(self).name if mode == "ghost" else f"{type(self).name}, {mode}"
        self.name += ", drop" * (nonfinite == "drop")
        if mode.endswith("_bk"):
            self.features = _of_bookkeeping(self.features)

    def build(self, model: nn.Module, setup: Setup) -> ReferenceTrainer:
        if setup.using:
            from fsdpcheck.adapters.builtin import (
                _fsdp2_features as _fsdp2,  # what it imports is needed for features alone
            )

            _fsdp2.prepare(model, setup)
        return ReferenceTrainer(self.shard(model, setup), setup, self.mode, self.nonfinite)

    def stored(self, folder: str) -> list[Stored]:
        from fsdpcheck.adapters.builtin import _checkpoint  # what it imports takes as long as a hundred small cases

        return _checkpoint.stored(folder)

    def read(self, folder: str, model: nn.Module) -> None:
        from fsdpcheck.adapters.builtin import _checkpoint

        _checkpoint.read(folder, model)

    def sampler(self, setup: SamplerSetup) -> Sampler:
        from fsdpcheck.adapters.builtin import _reference_samplers

        return _reference_samplers.sampler(setup)

    def engine(self, setup: EngineSetup) -> Mapping[str, float | int | str]:
        from fsdpcheck.adapters.builtin import _reference_samplers

        return _reference_samplers.public(setup)

    def kernels(self) -> Mapping[str, Kernel]:
        from fsdpcheck.adapters.builtin import _reference_kernels

        return _reference_kernels.kernels()

    def shard(self, model: nn.Module, setup: Setup) -> Sharded:
        """Flat buffers over all ranks, or with replicas over one axis of the mesh."""
        from fsdpcheck.impl.sharding import collectives, flat_model

        units = [name for names in setup.units for name in names]
        shards, replicas = collectives.axis(), collectives.ALONE
        if setup.mesh.dp_replicate > 1:
            mesh = mesh_of(setup, "dp_shard")
            shards, replicas = (collectives.axis(mesh.get_group(name)) for name in ("dp_shard", "dp_replicate"))
        return flat_model.ShardedModel(
            model,
            units,
            shards,
            setup.mesh.reshard_after_forward,
            replicas,
            compute_dtype=setup.compute_dtype,
            sync_module_states="broadcast" in setup.using,
        )


adapter = Reference()
bookkeeping = Reference("ghost_bk")
"""One backward: clipped gradients from what it kept."""
dropping = Reference("ghost_bk", "drop")
"""Samples without a finite norm are left out instead of refused."""
flash = Reference("flash")
"""Norms of Linear layers by kernels: interpreted or their twins in torch without a GPU."""
flash_bookkeeping = Reference("flash_bk")
"""Both."""
