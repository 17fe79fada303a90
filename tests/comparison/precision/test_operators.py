"""Which operators are exact: each is called in float32 and in float64 on the same numbers, and must give the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.comparison.precision import tables
from fsdpcheck.comparison.precision.noise import Noise
from fsdpcheck.comparison.precision.operators import KINDS, Operator, base_name, operator

aten = torch.ops.aten


class Exactness(TorchDispatchMode):
    """Repeats each exact operator in float64, and each other one with noise. ``wrong``: what was found wrong."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples, self.seen, self.wrong = samples, Counter[str](), set[str]()
        self.kinds: dict[str, str] = {}
        self._noise = Noise(1)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known, options = operator(func), kwargs or {}
        self.kinds[known.base] = known.rounding
        self.seen[known.name] += 1
        result = func(*args, **options)
        if self.seen[known.name] <= self.samples and not _adds_up(known, args):
            try:
                if known.rounding == "exact":
                    self._twice(known, args, options)
                elif known.rounding in ("rounding", "reduction") and not known.keeps:
                    self._unharmed(known, args, options)
            except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError) as error:
                self.wrong.add(f"{known.name} failed: {error}")
        return result

    def _twice(self, known: Operator, args: Any, options: Any) -> None:
        given = _pytree.tree_map(_single, (args, options))
        low, high = _pytree.tree_map(_copied, given), _pytree.tree_map(_wide, given)
        results = known.func(*low[0], **low[1]), known.func(*high[0], **high[1])
        if not _same(*results) or not _same(low[0], high[0]):
            self.wrong.add(f"{known.name} rounds")

    def _unharmed(self, known: Operator, args: Any, options: Any) -> None:
        """What an operator is given is not what it gives: noise of its results would change it."""
        before = _pytree.tree_map(_copied, args)
        noisy = self._noise.inputs(known, args)
        result = known.func(*noisy, **options)
        self._noise.results(known, noisy, result)
        kept = [number for number in range(len(args)) if number not in known.written]
        if not _same([args[number] for number in kept], [before[number] for number in kept]):
            self.wrong.add(f"noise of {known.name} changes its inputs")


def _adds_up(known: Operator, args: Sequence[Any]) -> bool:
    return known.accumulates is not None and len(args) > known.accumulates and bool(args[known.accumulates])


def _single(value: Any) -> Any:
    return float(torch.tensor(value, dtype=torch.float32)) if isinstance(value, float) else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    return torch.float64 if value is torch.float32 else value


def _same(low: Any, high: Any) -> bool:
    if isinstance(low, Tensor):
        return low.shape == high.shape and torch.equal(_numbers(low), _numbers(high))
    if isinstance(low, list | tuple):
        return len(low) == len(high) and all(map(_same, low, high))
    return True


def _numbers(tensor: Tensor) -> Tensor:
    tensor = tensor.to_dense()
    return tensor.double().nan_to_num(nan=7.0) if tensor.is_floating_point() else tensor


def by_hand() -> Iterator[Callable[[], object]]:
    x = torch.arange(24.0).reshape(4, 6).sub(11).div(7)
    row, rows = torch.tensor([3, 0, 1, 3]), torch.arange(4)
    yield from (x.relu, x.neg, x.abs, x.sign, x.clone, x.t, x.trunc, x.round, x.sort, x.max, x.contiguous, x.flatten)
    yield from (lambda: x[row], lambda: x.index_select(0, row), lambda: x.gather(0, row[None]), lambda: x[x > 0])
    yield from (lambda: torch.where(x > 0, x, -x), lambda: x.masked_fill(x > 0, 0.1), lambda: torch.cat([x, x]))
    yield from (lambda: x.clamp(-0.3, 0.3), lambda: x.topk(2), lambda: x.tril(), lambda: x.roll(1), lambda: x.amax(0))
    yield from (lambda: aten.threshold_backward(x, x, 0.1), lambda: aten.slice_backward(x, [9, 6], 0, 2, 6, 1))
    yield from (lambda: aten.select_backward(x, [2, 4, 6], 0, 1), lambda: aten.hardtanh_backward(x, x, -1.0, 1.0))
    yield from (lambda: torch.nn.functional.pad(x, (1, 1)), lambda: torch.nn.functional.embedding(row, x))
    yield from (
        lambda: torch.nn.functional.max_pool2d(x[None], 2),
        lambda: x.unfold(1, 2, 1),
        lambda: x.expand(2, 4, 6),
    )
    yield from (lambda: x.scatter(0, row[None], x), lambda: x.index_put((rows,), x), lambda: torch.stack([x, x]))
    yield from (
        lambda: x @ x.t(),
        lambda: x.sum(),
        lambda: x.softmax(0),
        lambda: x.exp(),
        lambda: x.norm(),
        lambda: x + x,
    )


def test_operators_called_exact_are() -> None:
    with Exactness(samples=2) as seen:
        for call in by_hand():
            call()
    assert not seen.wrong
    assert Counter(seen.kinds.values())["exact"] > 30


@pytest.mark.parametrize("wrongly", ["mul", "exp", "sum"])
def test_an_operator_wrongly_called_exact_is_found(wrongly: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(50)
    call = {"mul": lambda: x * x, "exp": x.exp, "sum": x.sum}[wrongly]
    with monkeypatch.context() as patch:
        patch.setattr("fsdpcheck.comparison.precision.operators._OPERATORS", {})
        patch.setattr("fsdpcheck.comparison.precision.operators.EXACT", tables.EXACT | {wrongly})
        with Exactness(samples=1) as seen:
            call()
    assert [text for text in seen.wrong if text.endswith("rounds")]


def test_noise_of_what_shares_memory_would_be_found() -> None:
    with library._scoped_library("fsdpcheck_tests", "DEF") as made:
        made.define("sharing(Tensor x) -> Tensor")
        made.impl("sharing", lambda x: x[:], "CPU")  # which its schema denies
        with Exactness(samples=1) as seen:
            torch.ops.fsdpcheck_tests.sharing(torch.rand(50))
    assert seen.wrong == {"noise of fsdpcheck_tests.sharing.default changes its inputs"}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_operators_called_exact_are_on_every_sample_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)  # which this import calls, for good
    methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    called = 0
    with Exactness(samples=4) as seen:
        for one in methods.op_db:
            for sample in _samples(one):
                try:
                    result = one(sample.input, *sample.args, **sample.kwargs)
                    made = [part for part in _pytree.tree_leaves(result) if _may_go_back(part)]
                    if made:
                        torch.autograd.backward(made, [torch.ones_like(part) / 3 for part in made])
                except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError):  # a CPU cannot
                    continue
                called += 1
    assert not seen.wrong
    assert called > 2000
    unseen = tables.EXACT - set(seen.kinds) - tables.SCALER
    assert len(unseen) < 60, sorted(unseen)


def _may_go_back(part: Any) -> bool:
    return isinstance(part, Tensor) and part.requires_grad


def _samples(one: Any) -> list[Any]:
    if torch.float32 not in one.dtypes:
        return []
    with torch.utils._python_dispatch._disable_current_modes():
        try:
            return list(one.sample_inputs("cpu", torch.float32, requires_grad=one.supports_autograd))[:4]
        except (RuntimeError, NotImplementedError):
            return []


def test_tables_name_operators_of_torch_and_none_twice() -> None:
    known = {base_name(schema.name.partition("::")[2]) for schema in torch._C._jit_get_all_schemas()}
    groups: list[frozenset[str]] = [
        tables.EXACT,
        tables.CAST,
        tables.CONSTANT,
        tables.DRAW,
        frozenset(tables.REDUCTION),
    ]
    for names in groups:
        assert {name for name in names if name not in known} <= {"all_gather_copy_in", "chunk_cat"}
    assert sum(map(len, groups)) == len(frozenset().union(*groups))


def test_an_unknown_operator_that_gives_floats_rounds() -> None:
    with library._scoped_library("fsdpcheck_tests", "DEF") as made:
        made.define("unknown(Tensor x) -> Tensor")
        assert operator(torch.ops.fsdpcheck_tests.unknown.default).rounding == "rounding"
    assert set(KINDS) >= {operator(aten.mm.default).rounding, operator(aten.view.default).rounding}
    assert operator(aten.scatter.reduce).rounding == operator(aten._foreach_norm.Scalar).rounding == "reduction"
    assert operator(aten._foreach_add_.List).rounding == "rounding"
    assert operator(aten._foreach_copy_.default).rounding == "cast"
    assert operator(aten.round.decimals).rounding == "rounding"
