"""The text of a program that shows with torch alone what differs: reproducer.py cuts it to a case."""

from __future__ import annotations

import os

# begin seed
import random

# end seed
import runpy
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

# begin seed
import numpy as np

# end seed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

# begin case
WHAT, STEP, HALF, SHAPE, NUMBER, WANTED = "gradient of 0.weight at step 0", 0, 0.0, [2, 3], 0, [0.0]
BASE, RANKS, WORDS = 1, 2, {1: ["train.py"], 2: ["train.py"]}
SEATS: dict[int, dict[int, tuple[int, int]]] = {1: {0: (0, 0)}, 2: {0: (0, 0), 1: (0, 0)}}
PARTS: dict[int, dict[int, list[tuple[int, int, int]]]] = {}
PLACES: list[int] = []
SEED = 0
# end case
GIVEN = sys.argv[1:]  # to the script, after its own arguments
SIZE, RANK = int(os.environ.get("WORLD_SIZE", 0)), int(os.environ.get("RANK", 0))
STEPS: Counter[Optimizer] = Counter()  # that have ended, by optimizer in the order of its first
STEPPING: list[Optimizer] = []  # of optimizers that step others the outermost is the first


class Seen(BaseException):
    """What was sought was seen, so the script need not go on."""


def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    STEPPING.append(optimizer)
    STEPS[STEPPING[0]] += 0
    # begin before
    if len(STEPPING) == 1:
        look(optimizer)
    # end before
    # begin gradient
    if len(STEPPING) == 1 and len(args) < 2 and not kwargs:  # else a closure computes it
        look(optimizer)
    # end gradient


def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # begin after
    look(optimizer)
    # end after
    while STEPPING.pop() is not optimizer:
        pass
    STEPS[optimizer] += not STEPPING


# begin look
def look(optimizer: Optimizer) -> None:
    """Where this is the step, ranks meet with what they have."""
    outermost = STEPPING[0]
    number = list(STEPS).index(outermost)
    wanted, place = SEATS[SIZE].get(RANK, (number, -1))
    if (STEPS[outermost], number) == (STEP, wanted):
        pairs = [(parameter, group) for group in outermost.param_groups for parameter in group["params"]]
        value = sought(*pairs[place], optimizer) if place >= 0 else None
        if value is not None or len(STEPPING) == 1:
            meet(value)


def sought(parameter: Any, group: Any, optimizer: Optimizer) -> Any:
    return parameter.grad  # sought


# end look
# begin norm
def watch_norms() -> None:
    """Functions that clip gradients tell what they return."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    seen, inside = Counter[int](), list[str]()

    def watched(real: Any) -> Any:
        def ours(*args: Any, **kwargs: Any) -> Any:
            inside.append("")
            norm = real(*args, **kwargs)
            inside.pop()
            step = max(STEPS.values(), default=0)
            seen[step] += not inside
            if not inside and (step, seen[step]) == (STEP, NUMBER + 1):
                meet(norm)
            return norm

        return ours

    for owner in (torch.nn.utils, torch.nn.utils.clip_grad, FullyShardedDataParallel):
        for name in {"clip_grad_norm_", "clip_grad_norm", "get_total_norm"} & {*vars(owner)}:
            setattr(owner, name, watched(getattr(owner, name)))


# end norm
# begin meet
def meet(value: Any) -> None:
    """End the script with what each rank has."""
    # begin whole
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    # end whole
    # begin local
    if hasattr(value, "to_local"):
        value = value.to_local()
    # end local
    mine = None if value is None else torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().reshape(-1)
    everyone: list[Any] = [mine] * SIZE
    if SIZE > 1:
        dist.all_gather_object(everyone, mine)
    raise Seen(everyone)


# end meet
def run() -> list[Any]:
    """Run the script on this rank until it is seen; what each rank has."""
    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)
    # begin norm
    watch_norms()
    # end norm
    # begin dropout
    attend = F.scaled_dot_product_attention
    for name in [name for name in vars(F) if "dropout" in name]:
        setattr(F, name, lambda input, *args, **options: input)
    F.scaled_dot_product_attention = lambda *args, dropout_p=0.0, **options: attend(*args[:4], *args[5:], **options)
    # end dropout
    # begin seed
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    # end seed
    sys.argv = [*WORDS[SIZE], *GIVEN]
    try:
        if sys.argv[0] == "-m":
            sys.path[0] = os.getcwd()
            runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Seen as seen:
        return list(seen.args[0])
    # begin steps
    return [torch.tensor([*STEPS.values()], dtype=torch.float64)] * SIZE
    # end steps
    sys.exit(f"{WHAT} was not met")


# begin apart
def apart(got: Any, wanted: Any) -> Any:
    """How far by entry: infinitely where one has a number and the other has none."""
    # begin gradient
    if (got is None) != (wanted is None):
        got, wanted = (torch.zeros_like(there if one is None else one) for one, there in ((got, wanted), (wanted, got)))
    # end gradient
    if got is None or wanted is None or got.shape != wanted.shape:
        return torch.tensor([0.0 if got is wanted else float("inf")])
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    return torch.where(same, 0.0, (got - wanted).abs()).nan_to_num(float("inf"), posinf=float("inf"))


# end apart
# begin by rank
def beside_others() -> int:
    """1 if what this rank has is not what is wanted, else 0."""
    if SIZE != RANKS:
        sys.exit(f"to be run by: torchrun --nproc-per-node {RANKS} {sys.argv[0]}")
    everyone = run()
    got = everyone[RANK]
    # begin number
    wanted = torch.tensor(WANTED, dtype=torch.float64)
    # end number
    # begin replicas
    wanted = next(value for value in everyone if value is not None)
    # end replicas
    if got is None or not len(got):
        return 0
    largest = float(apart(got, wanted).max())
    print(f"{WHAT}, rank {RANK}: {got.tolist()[:4]}, wanted {wanted.tolist()[:4]}, apart by {largest:.9g}")
    return int(largest > 0)


# end by rank
# begin whole
def whole(everyone: list[Any]) -> Any:
    """Put together of what ranks have."""
    # begin parts
    found = torch.zeros(len(PLACES), dtype=torch.float64)
    for rank, runs in PARTS[SIZE].items():
        for begin, place, many in runs:
            found[place : place + many] = everyone[rank][begin : begin + many]
    return found
    # end parts
    # begin plain
    return next((value for value in everyone if value is not None), None)
    # end plain


def of_base() -> Any:
    """What the base has, in processes of its own."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "ANSWER": f"{folder}/base"}
        free.close()
        ours |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(BASE))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        started = [
            subprocess.Popen([sys.executable, __file__, *GIVEN], env={**kept, **ours, "RANK": rank, "LOCAL_RANK": rank})
            for rank in map(str, range(BASE))
        ]
        if any([process.wait() for process in started]):
            sys.exit("the script fails on the base")
        return torch.load(ours["ANSWER"])


def shown(got: Any, wanted: Any) -> int:
    """Print the entries that lie farthest apart; 1 if they are too far, else 0."""
    distances = apart(got, wanted)
    print(f"{WHAT}, {RANKS} ranks beside {BASE}:")
    for place in distances.argsort(descending=True, stable=True)[:4].tolist():
        index = [int(one) for one in torch.unravel_index(torch.tensor((PLACES or range(len(distances)))[place]), SHAPE)]
        said = ["none" if value is None else f"{float(value[place]):.9g}" for value in (got, wanted)]
        print(f"  {index}: got {said[0]}, wanted {said[1]}")
    largest = float(distances.max())
    print(f"largest difference {largest:.9g}, {'more' if largest > HALF else 'no more'} than {HALF:.9g}")
    return int(largest > HALF)


def beside_base() -> int:
    """1 if it differs, else 0; run as one process, print what the base has."""
    if not SIZE:
        return shown(*[of_base()] * 2)
    everyone = run()
    if "ANSWER" not in os.environ:
        return shown(whole(everyone), of_base()) if RANK == 0 else 0
    if RANK == 0:
        torch.save(whole(everyone), os.environ["ANSWER"])
    return 0


# end whole
if __name__ == "__main__":
    # begin by rank
    sys.exit(beside_others())
    # end by rank
    # begin whole
    sys.exit(beside_base())
    # end whole
