"""The optimizers of a rank: what ``Setup.optimizer`` makes, drawn or by a user's own function, and what they update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fsdpcheck.adapters.contract import Given
from fsdpcheck.case import TrainingCase
from fsdpcheck.compat.torch_private import is_dtensor
from fsdpcheck.errors import AdapterError, explain
from fsdpcheck.program.probe import Watch
from fsdpcheck.workload.clip_groups import is_instrument
from fsdpcheck.workload.optimizer import in_last_unit, make_optimizer, resume_
from fsdpcheck.workload.user_model import own_optimizer


class Optimizers:
    """Makes those of one trainer after another; ``made`` are the newest trainer's. Nobody watches without ``watch``."""

    def __init__(self, case: TrainingCase, watch: Watch | None) -> None:
        self._case, self._watch = case, watch
        self._model: nn.Module = nn.Module()
        self.made: list[torch.optim.Optimizer] = []

    def begin(self, model: nn.Module) -> None:
        """A trainer of ``model`` is built next."""
        self._model, self.made = model, []

    def __call__(self, parameters: Iterable[Given]) -> torch.optim.Optimizer:
        """See ``Setup.optimizer``. Its parameters are shown to the probes."""
        own, given = self._case.step.optimizer.kind == "own", list(parameters)
        known = [one[1] if isinstance(one, tuple) else one for one in given]
        self.made.append(self._own(known) if own else self._drawn(known, given))
        if self._watch is not None:
            self._watch.optimizer(self.made[-1])
        return self.made[-1]

    def updated(self) -> list[Tensor]:
        """This rank's part of every parameter that an optimizer updates, live."""
        held = [value for optimizer in self.made for group in optimizer.param_groups for value in group["params"]]
        return [value.to_local() if is_dtensor(value) else value for value in held]

    def _drawn(self, parameters: list[nn.Parameter], given: list[Given]) -> torch.optim.Optimizer:
        """It may be resumed between steps, which must change nothing."""
        spec = self._case.step.optimizer
        apart = self._of_last_unit(given) if spec.groups == "last unit apart" else ()
        optimizer = make_optimizer(spec, parameters, apart)
        if self._case.step.resume:
            optimizer.register_step_post_hook(lambda *_: resume_(optimizer))
        return optimizer

    def _of_last_unit(self, given: list[Given]) -> list[nn.Parameter]:
        """Those of the last unit. Raises AdapterError for ones that are not the model's own and come without a name."""
        names = {id(value): name for name, value in self._model.named_parameters()}
        pairs = [one if isinstance(one, tuple) else (names.get(id(one)), one) for one in given]
        if any(name is None for name, _ in pairs):
            what = "an optimizer of two groups is given parameters that the model does not have, without their names"
            got, then = "tensors without a name", "give (name, parameter), or do not accept 'unit-groups'"
            raise AdapterError(explain(what, got=got, wanted="the model's own parameters, or pairs", then=then))
        return [value for name, value in pairs if in_last_unit(self._case, name or "")]

    def _own(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The user's own, of the user's model as it is now. Raises NotImplementedError for who trains other tensors."""
        assert self._case.model.own is not None
        names = {id(value): name for name, value in self._model.named_parameters(remove_duplicate=False)}
        trained = {id(value) for value in parameters if isinstance(value, Tensor) and value.requires_grad}
        wanted = {id(value) for name, value in self._model.named_parameters() if value.requires_grad}
        if {one for one in trained ^ wanted if not is_instrument(names.get(one, ""))}:
            raise NotImplementedError(
                "your optimizer(model) is given the model, and this adapter does not train that model's own parameters,"
                " all of them by one optimizer; leave --optimizer out"
            )
        return own_optimizer.made(self._case.model.own.optimizer, self._model.get_submodule("model"))
