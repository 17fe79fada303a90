"""gloo's collectives take a tensor with gaps for a dense one, and write beside it: torchrun --nproc-per-node 2 this.py

all_reduce(b[::2]) adds up the first three elements of b and not every second one, in silence; broadcast does the like.
NCCL refuses such tensors. gather and all_gather were mended by pytorch#158903; pytorch#192920 is about the others.
"""

import os
import sys

import torch
import torch.distributed as dist

if os.environ.get("WORLD_SIZE") != "2":
    sys.exit(f"to be run by: torchrun --nproc-per-node 2 {__file__}")
dist.init_process_group("gloo")
rank, wrong = dist.get_rank(), False
of_ranks = [torch.arange(6.0) * (rank + 1) for rank in range(2)]
for name, collective, every_second in (
    ("all_reduce", dist.all_reduce, (of_ranks[0] + of_ranks[1])[::2]),
    ("broadcast from 0", lambda tensor: dist.broadcast(tensor, src=0), of_ranks[0][::2]),
):
    wanted = of_ranks[rank].clone()
    wanted[::2] = every_second
    got = of_ranks[rank].clone()
    collective(got[::2])
    print(f"{name} of every second element, rank {rank}: got {got.tolist()}, wanted {wanted.tolist()}", flush=True)
    wrong |= not torch.equal(got, wanted)
dist.destroy_process_group()
sys.exit(wrong)
