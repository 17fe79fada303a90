"""A finding as a program of torch alone: what an issue of the implementation needs. ``replay TOKEN --script FILE``.

The program builds the drawn model, trains it on one device and on W ranks of gloo, and prints what differs. How the
model is made parallel is the adapter's to say (``Snippets``). Every bit counts, because all sums of the case are exact.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from fsdpcheck.adapters.contract import Snippets
from fsdpcheck.case import OptimizerSpec, TrainingCase
from fsdpcheck.case.axes import Axis
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.findings.tokens import Token
from fsdpcheck.workload import batches, models
from fsdpcheck.workload.optimizer import TOWARDS_ZERO

_LAWS = ("training.plain", "training.gradients", "training.evaluation", "collectives.plain")
"""What the program looks at is what these laws say."""
_MODULES = (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Flatten, nn.ReLU, nn.LeakyReLU, nn.Hardtanh)
"""Modules whose repr is the expression that makes them, once ``nn.`` stands before it."""
_LOSSES = {
    "mse": "0.5 * (y - t).square().sum(1)",
    "linear": "(y * t).sum(1)",
    "hinge": "(1 - y * t.sign()).relu().sum(1)",
    "l1": "(y - t).abs().sum(1)",
}


_MARK = "snippets: "
_ASKING = f"""
import dataclasses, json, sys
from fsdpcheck import adapters
found = getattr(adapters.load(sys.argv[1]), "snippets", None)
print({_MARK!r} + json.dumps(None if found is None else dataclasses.asdict(found)))
"""


class NotWritten(UsageError):
    """No such program can be written; the text says why."""


def program(token: Token, guarantee: str, file: Path) -> str:
    """The program that shows what ``token`` shows. Raises NotWritten."""
    case = token.case
    if not isinstance(case, TrainingCase):
        raise _refusal("a case that trains nothing", "a finding of a training")
    if why := next(_against(token, case), ""):
        raise _refusal(why, f"plain training on a grid, judged by one of {', '.join(_LAWS)}")
    return _spaced("\n".join(_lines(case, _snippets(token.adapter), guarantee, file)).splitlines())


def _spaced(lines: list[str]) -> str:
    """One empty line before each part, and none elsewhere behind the document."""
    head = next(number for number, line in enumerate(lines) if number and line.endswith('"""')) + 1
    parts = ("from collections", "VALUES", "class ", "    def forward", "def ", "dist.init")
    kept = [text for line in lines[head:] if line for text in [""] * line.startswith(parts) + [line]]
    return "\n".join([*lines[:head], *kept]) + "\n"


def _snippets(adapter: str) -> Snippets:
    """Those of an adapter, which is loaded in a process of its own: nobody's code runs where a verdict is told."""
    ran = subprocess.run([sys.executable, "-c", _ASKING, adapter], capture_output=True, text=True, check=False)
    found = ran.stdout.rpartition(_MARK)[2] if ran.returncode == 0 else ""
    if found.strip() in ("", "null"):
        got, wanted = f"adapter {adapter!r} without them", "snippets: Snippets(parallelize=...)"
        what = "how the model is made parallel is not known as text"
        raise NotWritten(explain(what, got=got, wanted=wanted, then="see fsdpcheck.adapter.Snippets"))
    return Snippets(**json.loads(found))


def _refusal(got: str, wanted: str) -> NotWritten:
    then = "send the replay line instead, or leave such cases out with --avoid and find it again"
    return NotWritten(
        explain("no program of torch alone is written for this finding", got=got, wanted=wanted, then=then)
    )


def _against(token: Token, case: TrainingCase) -> Iterator[str]:
    """Why the program would not show the finding."""
    step, arithmetic = case.step, case.arithmetic
    demands = case.requires() & {
        "surrogates",
        "attention",
        "routed",
        "reused",
        "one-row",
        "dropped",
        "real",
        "bfloat16",
        "tf32",
        "own-layers",
    }
    yield from (f"the trait {trait}" for trait in sorted(demands))
    yield from (f"the law {token.law}" for _ in range(token.law not in _LAWS))
    facts = {
        "a planted fault": bool(token.installs),
        "per-sample clipping": step.private,
        "a global norm, which is judged within a bound": step.max_grad_norm is not None,
        "a model of your own": case.model.own is not None,
        "a resumed optimizer": step.resume,
        "an optimizer of whole matrices": step.optimizer.kind == "newton_schulz",
        "an optimizer of whole rows": step.optimizer.kind == "row_scaled",
        "a model trained before": step.rebuilds,
        "parameters that are thawed": step.thaws,
        "parameters that are frozen again": step.refreezes,
        "unequal numbers of micro-batches": step.unequal,
        "an optimizer of two groups, or whose rate changes": (step.optimizer.groups, step.optimizer.schedule)
        != ("one", "constant"),
        "averages that are premultiplied": arithmetic.averaging != "divide",
        "a mesh with other axes than dp_replicate and dp_shard": bool(case.mesh.axes),
    }
    yield from (what for what, holds in facts.items() if holds)


def _lines(case: TrainingCase, snippets: Snippets, guarantee: str, file: Path) -> Iterator[str]:
    yield f'"""Broken: {guarantee} torchrun --nproc-per-node {case.world_size} {file.name}\n'
    yield 'It prints what is wrong and ends with code 1, or raises, or does not end. With code 0 all is right.\n"""\n'
    yield "from collections import OrderedDict"
    imports = [
        line for line in snippets.imports.splitlines() if case.step.micro_batches > 1 or "nullcontext" not in line
    ]
    yield from dict.fromkeys(("import sys", *imports))
    yield from ("", "import torch", "import torch.distributed as dist", "from torch import nn")
    yield "from torch.distributed.device_mesh import init_device_mesh\n"
    yield from _data(case)
    yield from _model(case)
    yield from _training(case, snippets)


def _data(case: TrainingCase) -> Iterator[str]:
    """Parameters, and of each step, rank and micro-batch inputs and targets."""
    values = {name: value.tolist() for name, value in models.initial_parameters(case).items()}
    yield f"VALUES = {values}  # before the first step"
    yield "# of each step, of each rank, of each micro-batch: (inputs, targets)"
    targets, inputs = _packed(case), batches.inputs(case)
    steps = [
        [[(inputs[list(chunk)].tolist(), targets[k][list(chunk)].tolist()) for chunk in own] for own in ranks]
        for k, ranks in enumerate(batches.indices(case, k) for k in range(case.step.steps))
    ]
    yield f"STEPS = {steps}\n"


def _packed(case: TrainingCase) -> list[torch.Tensor]:
    from fsdpcheck.oracle import plain_targets  # the gauge's targets are the oracle's

    body, found = batches.targets(case), []
    for k in range(case.step.steps):
        samples = sorted(batches.logical_batch(case, k))
        rows = body.new_zeros(len(body), models.instrument_width(case))
        rows[samples] = plain_targets(case, k, samples).to(body.dtype)
        found.append(torch.cat([body, rows], 1))
    return found


def _model(case: TrainingCase) -> Iterator[str]:
    made = models.build(case)
    yield "\nclass Model(nn.Module):"
    yield "    def __init__(self):"
    yield "        super().__init__()"
    yield f"        self.units = nn.ModuleList([{', '.join(_chain(unit) for unit in made.units)}])"
    yield f"        self.tail = {_chain(made.tail)}"
    yield f"        self.instrument = {_made(made.instrument)}"
    for layer in models.layer_names(case):
        if layer.tied_to:
            yield f"        self.get_submodule({layer.name!r}).weight = self.get_submodule({layer.tied_to!r}).weight"
    for name, parameter in made.named_parameters():
        if not parameter.requires_grad:
            yield f"        self.get_parameter({name!r}).requires_grad_(False)"
    yield "        for name, parameter in self.named_parameters():"
    yield f"            parameter.data = torch.tensor(VALUES[name], dtype=torch.{case.arithmetic.dtype})\n"
    yield "    def forward(self, hidden):"
    yield "        for unit in (*self.units, self.tail):"
    yield "            hidden = unit(hidden)"
    yield "        body = hidden.flatten(1)"
    yield "        return torch.cat([body, self.instrument(body.new_ones(len(body), 1))], 1)\n\n"


def _chain(chain: nn.Module) -> str:
    made = ", ".join(f"{name!r}: {_made(module)}" for name, module in chain.named_children())
    return f"nn.Sequential(OrderedDict({{{made}}}))" if made else "nn.Sequential()"


def _made(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding):
        return f"nn.Embedding({module.num_embeddings}, {module.embedding_dim}, padding_idx={module.padding_idx})"
    if isinstance(module, nn.EmbeddingBag):
        sizes = f"{module.num_embeddings}, {module.embedding_dim}"
        return f'nn.EmbeddingBag({sizes}, mode="{module.mode}", padding_idx={module.padding_idx})'
    if isinstance(module, nn.modules.conv._ConvNd) or type(module) in _MODULES:
        return f"nn.{module!r}".replace("padding=same", 'padding="same"')  # a word that torch prints bare
    raise _refusal(f"a module {type(module).__name__}", "layers of torch that no surrogate stands for")


def _training(case: TrainingCase, snippets: Snippets) -> Iterator[str]:
    step, features, dtype = case.step, models.body_features(case), case.arithmetic.dtype
    shape = tuple(batches.inputs(case).shape[1:])
    kind = "torch.int64" if case.model.input in ("tokens", "bags") else f"torch.{dtype}"
    yield "def losses(model, inputs, targets):"
    yield f"    inputs = torch.tensor(inputs, dtype={kind}).reshape(len(inputs), *{shape})"
    yield f"    targets = torch.tensor(targets, dtype=torch.{dtype}).reshape(len(targets), {models.outputs(case)})"
    yield f"    (y, v), (t, u) = (both.tensor_split([{features}], dim=1) for both in (model(inputs), targets))"
    yield f"    return ({_LOSSES[step.loss]} + (u * v).sum(1)) * {models.loss_scale(case)}\n\n"
    yield 'dist.init_process_group("gloo")'
    yield "RANK = dist.get_rank()"
    axes: list[Axis] = [*case.mesh.sizes] or ["dp_shard"]
    sizes = tuple(case.mesh.sizes.get(axis, 1) for axis in axes)
    yield f'mesh = init_device_mesh("cpu", {sizes}, mesh_dim_names={tuple(axes)})'
    yield "single, model = Model(), Model()"
    if "UNITS" in snippets.parallelize:
        yield f"UNITS = {[name for names in models.unit_names(case) for name in names]}"
    yield from snippets.parallelize.format(reshard=case.mesh.reshard_after_forward).splitlines()
    yield f"alone, together = ({_optimizer(step.optimizer)} for m in (single, parallel))"
    yield "for number, step in enumerate(STEPS):"
    yield "    alone.zero_grad()"
    yield f"    every = [micro for own in step[::{case.copies}] for micro in own]"
    yield f"    (sum(losses(single, x, y).sum() for x, y in every) / {step.normaliser}).backward()"
    yield "    alone.step()"
    if step.evaluates != "no":
        yield f"    with torch.{step.evaluates}():"
        yield "        losses(parallel, *step[RANK][0])"
    yield "    together.zero_grad()"
    yield "    for micro, (x, y) in enumerate(step[RANK]):"
    yield from (f"        {line}" for line in _micro_step(case, snippets))
    yield "    together.step()"
    yield from (f"    {line}" for line in snippets.whole.splitlines())
    yield "    for name, wanted in single.named_parameters():"
    yield "        if not torch.equal(whole[name], wanted):"
    yield "            got = whole[name].tolist()"
    yield '            print(f"step {number}, rank {RANK}, {name}: got {got}, wanted {wanted.tolist()}")'
    yield "            sys.exit(1)"
    if case.arithmetic.project and step.steps > 1:
        yield "    with torch.no_grad():  # so that the next step is exact again"
        yield "        for value in [*parallel.parameters(), *single.parameters()]:"
        bound = case.arithmetic.weights
        yield '            value = getattr(value, "_local_tensor", value)'
        yield f"            value.mul_({TOWARDS_ZERO}).round_().clamp_(-{bound}, {bound})"


def _micro_step(case: TrainingCase, snippets: Snippets) -> Iterator[str]:
    """Forward and backward of micro-batch number ``micro``."""
    step, inner = case.step, ""
    share = "mean()" if step.reduction == "mean" else f"sum().mul({case.shares / step.normaliser})"
    if step.micro_batches > 1:
        yield f"reduces = {step.sync_every} or micro == {step.micro_batches - 1}"
        yield from [f"with {snippets.context}:"] * bool(snippets.context)
        inner = "    " * bool(snippets.context)
        yield from (inner + line for line in snippets.before.splitlines())
    yield f"{inner}losses(parallel, x, y).{share}.backward()"


def _optimizer(spec: OptimizerSpec) -> str:
    options = f"lr={2.0**-spec.lr_exponent}, weight_decay={spec.weight_decay}, foreach=False"
    if spec.kind == "sgd":
        return f"torch.optim.SGD(m.parameters(), momentum={spec.momentum}, {options})"
    return f"torch.optim.{'Adam' if spec.kind == 'adam' else 'AdamW'}(m.parameters(), {options})"
