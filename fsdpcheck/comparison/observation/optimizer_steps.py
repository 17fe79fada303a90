"""A rank's optimizers, each step of theirs: gradients, parameters, states and options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fsdpcheck.comparison.observation.parameter_names import Subject
from fsdpcheck.comparison.observation.rank_log import Moment, RankLog, line
from fsdpcheck.comparison.record import Piece, Seat
from fsdpcheck.compat import layouts_private
from fsdpcheck.compat.torch_private import is_dtensor, is_in_backward, own_part
from fsdpcheck.execution.pieces import number


class OptimizerSteps:
    """Hooks on every optimizer of a rank. Of optimizers that step others, the outermost counts."""

    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._optimizers: dict[Optimizer, int] = {}
        self._kinds: Counter[str] = Counter()
        self._stepping: list[Optimizer] = []
        self._options: dict[tuple[int, int, str], tuple[float, Piece]] = {}
        self._unseen: dict[Optimizer, str] = {}
        self._losses: set[float] = set()  # that closures returned
        self.covered: dict[int, Tensor] = {}
        """Parameters that an optimizer has, by identity."""

    @layouts_private.aside()
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """A step begins. Given a closure, gives back one that is seen to end: only then there are gradients."""
        self._stepping.append(optimizer)
        self._unseen.pop(optimizer, None)
        if len(self._stepping) > 1:
            return None
        moment, of = self._log.now(), self._number(optimizer)
        if is_in_backward():
            self._log.note(f"{type(optimizer).__name__} steps in a backward")
        for group_number, group in enumerate(optimizer.param_groups):
            options = list(_numbers(group))
            for parameter in group["params"]:
                self._of_parameter_before(of, parameter, moment)
                for subject in self._log.names.subjects(parameter):
                    for name, value in options:
                        piece = self._option(of, group_number, name, value)
                        self._log.keep_piece(f"option {name}", self._log.steps[of], subject, piece, moment, of)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if callable(closure):
            ours = self._closure(closure, optimizer)
            return ((args[0], ours, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": ours})
        self._gradients(optimizer, moment)
        return None

    @layouts_private.aside()
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A step has ended."""
        if not self._stepping:
            return
        while self._stepping.pop() is not optimizer:  # one inside it that has raised
            if not self._stepping:
                return
        moment = self._log.now()
        if self._stepping:
            self._states(optimizer, self._optimizers[self._stepping[0]], moment)
            return
        of = self._optimizers[optimizer]
        for parameter in _parameters(optimizer):
            for subject in self._log.names.subjects(parameter):
                self._log.keep("parameter", self._log.steps[of], subject, parameter, moment, of)
        self._states(optimizer, of, moment)
        self._log.steps[of] += 1

    def made(self, optimizer: Optimizer) -> None:
        """An optimizer is made; no step of it has been seen."""
        self._unseen[optimizer] = line()

    def end(self) -> None:
        """The script has ended."""
        for optimizer, there in self._unseen.items():
            self._log.notes[f"no step was seen of the {type(optimizer).__name__} made at {there}"] += 1
        if self._stepping:
            kind = type(self._stepping[0]).__name__
            self._log.note(f"a step of {kind} did not end, and no later step was seen")
        self._copies()

    def _copies(self) -> None:
        """Keep what other modules have under the name and of the shape of a trained parameter: its average, say."""
        self._log.names.look()
        moment, names = self._log.now(), self._log.names.names()
        found = [(names.get(each.key), each) for each in self._log.names.found()]
        trained = {(name, each.parameter.shape) for name, each in found if id(each.parameter) in self.covered}
        for name, each in found:
            if id(each.parameter) not in self.covered and (name, each.parameter.shape) in trained:
                self._log.keep("final parameter", self._log.step, each, each.parameter, moment, 0)

    def _number(self, optimizer: Optimizer) -> int:
        """Which optimizer it is; the next, and its parameters are given names, where it has not stepped before."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = len(self._log.steps)
            self._log.steps.append(0)
            self._log.names.look()
            kind = type(optimizer).__name__
            self._kinds[kind] += 1
            kind = kind if self._kinds[kind] == 1 else f"{kind}#{self._kinds[kind]}"
            for place, parameter in enumerate(_parameters(optimizer)):
                for subject in self._log.names.subjects(parameter):
                    self._log.seats.setdefault(subject.key, _seat(subject, self._optimizers[optimizer], place))
                    inner = f": {subject.part.name}" if subject.part is not None else ""
                    self._log.names.call(subject, f"parameter {place} of {kind}{inner}")
        return self._optimizers[optimizer]

    def _of_parameter_before(self, of: int, parameter: Tensor, moment: Moment) -> None:
        if id(parameter) in self.covered:
            return
        self.covered[id(parameter)] = parameter
        for subject in self._log.names.subjects(parameter):
            self._log.keep("initial parameter", self._log.steps[of], subject, parameter, moment, of)

    @layouts_private.aside()
    def _gradients(self, optimizer: Optimizer, moment: Moment) -> None:
        of = self._optimizers[optimizer]
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                for subject in self._log.names.subjects(parameter):
                    self._log.keep("gradient", self._log.steps[of], subject, parameter.grad, moment, of)

    def _closure(self, closure: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
        def ours(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            self._gradients(optimizer, self._log.now())
            if loss is not None:
                self._losses.add(_value(loss) if isinstance(loss, Tensor) else float(loss))
            return loss

        return ours

    def _states(self, optimizer: Optimizer, of: int, moment: Moment) -> None:
        """Of the parameters that the outermost optimizer has."""
        strange = 0
        for parameter, state in list(optimizer.state.items()):
            if not isinstance(parameter, Tensor) or not isinstance(state, dict):
                continue
            if id(parameter) not in self.covered:
                strange += 1
                continue
            for name, value in state.items():
                self._state(f"state {name}", parameter, value, of, moment)
        if strange:
            kind = type(optimizer).__name__
            self._log.note(f"the states of {strange} tensors that {kind} steps for another optimizer are not compared")

    def _state(self, kind: str, parameter: Tensor, value: object, of: int, moment: Moment) -> None:
        for subject in self._log.names.subjects(parameter):
            if isinstance(value, Tensor):
                self._log.keep(kind, self._log.steps[of], subject, value, moment, of)
            elif isinstance(value, int) or (isinstance(value, float) and value not in self._losses):  # LBFGS keeps one
                self._log.keep_piece(kind, self._log.steps[of], subject, number(value), moment, of)

    def _option(self, of: int, group: int, name: str, value: float) -> Piece:
        """One piece for all parameters of a group, as long as the number stays what it is."""
        known = self._options.get((of, group, name))
        if known is None or known[0] != value:
            known = self._options[of, group, name] = value, number(value)
        return known[1]


def _seat(subject: Subject, optimizer: int, place: int) -> Seat:
    offset = subject.part.offset if subject.part is not None and subject.part.flat else 0
    return Seat(optimizer, place, offset, is_dtensor(subject.parameter))


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _numbers(group: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers among the options of a group; those of a pair are "betas.0" and "betas.1". A flag is no number."""
    for name, value in group.items():
        several = value if isinstance(value, list | tuple) and name != "params" else (value,)
        for place, one in enumerate(several):
            one = _value(one) if isinstance(one, Tensor) and one.numel() == 1 and not one.is_meta else one
            if isinstance(one, int | float) and not isinstance(one, bool):
                yield f"{name}.{place}" if len(several) > 1 else name, float(one)


def _value(tensor: Tensor) -> float:
    with layouts_private.aside():
        return float(own_part(tensor))
