"""Bugs of scripts with fully_shard and FullyShardedDataParallel."""

from __future__ import annotations

from typing import Final

from benchmarks.compared.planted import Bug

_CLIP: Final = "        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)\n"
_SHOWN: Final = "        total_norm = norm.full_tensor()\n"
_ALL: Final = (2, 3, 4)
_FSDP2: Final = "fsdp2_transformer"
_FSDP1: Final = "fsdp1_orig_params"

_OF_FSDP2: Final = (
    Bug(
        "clipped_by_the_norm_of_the_shard", _FSDP2, "clip norm", "gradient",
        "each rank clips its shard by the norm of its shard",
        ((_CLIP, """        norm = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad *= (args.max_norm / (norm + 1e-6)).clamp(max=1.0)
"""), (_SHOWN, "        total_norm = norm\n")), _ALL, source="B02",
    ),
    Bug(
        "norms_of_shards_added", _FSDP2, "clip norm", "gradient",
        "norms of shards are added, instead of their squares",
        ((_CLIP, """        norm = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
        dist.all_reduce(norm)
        for parameter in model.parameters():
            parameter.grad *= (args.max_norm / (norm + 1e-6)).clamp(max=1.0)
"""), (_SHOWN, "        total_norm = norm\n")), _ALL, source="B08",
    ),
    Bug(
        "norm_squared_over_all_ranks_twice", _FSDP2, "clip norm", "gradient",
        "the norm is already that of the whole gradient, and its square is summed over ranks again",
        ((_CLIP, """        squared = sum(p.grad.full_tensor().square().sum() for p in model.parameters())
        dist.all_reduce(squared)
        norm = squared.sqrt()
        for parameter in model.parameters():
            parameter.grad *= (args.max_norm / (norm + 1e-6)).clamp(max=1.0)
"""), (_SHOWN, "        total_norm = norm\n")), _ALL, source="B05",
    ),
    Bug(
        "each_rank_takes_the_first_rows", _FSDP2, "data", "data",
        "each rank takes the first rows of the global batch",
        (("ids[rank * batch_size : (rank + 1) * batch_size]", "ids[:batch_size]"),), _ALL,
    ),
    Bug(
        "rows_drawn_by_rank", _FSDP2, "data", "data",
        "each rank draws its own rows with a seed by rank, which are not those of one rank",
        (("manual_seed(1000 * seed + step)", "manual_seed(1000 * seed + step + 100 * rank)"),), _ALL, source="B67",
    ),
    Bug(
        "divide_factor_on_the_root_only", _FSDP2, "factor", "gradient",
        "embeddings and head, which the root has, are summed over ranks while layers are averaged",
        ((
            "    fully_shard(model, mesh=mesh)\n",
            "    fully_shard(model, mesh=mesh)\n"
            "    model.set_force_sum_reduction_for_comms(True)\n"
            "    model.set_gradient_divide_factor(1.0)\n"),), _ALL,
        source="B23",
    ),
    Bug(
        "loss_divided_by_ranks", _FSDP2, "factor", "gradient",
        "the loss is divided by the number of ranks, over which fully_shard averages already",
        (("        loss.backward()\n", "        (loss / world_size).backward()\n"),), _ALL, source="B18",
    ),
    Bug(
        "initialised_by_rank", _FSDP2, "random", "parameter",
        "each rank draws its shard of the parameters with its own seed",
        (("    torch.manual_seed(args.seed)\n", "    torch.manual_seed(args.seed + rank)\n"),), _ALL, source="B161",
    ),
    Bug(
        "row_norm_of_the_shard", _FSDP2, "other", "gradient",
        "gradients are scaled by the largest entry of the rank's shard, a rule of whole matrices",
        ((_CLIP, _CLIP + """        for parameter in model.parameters():
            local = parameter.grad.to_local()
            if local.numel():
                local /= local.abs().max() + 1e-8
"""),), _ALL, source="N17",
    ),
    Bug(
        "norm_of_one_group_only", _FSDP2, "clip norm", "norm",
        "the norm leaves out the shard of the last rank",
        ((_CLIP, """        squared = torch.stack([p.grad.to_local().square().sum() for p in model.parameters()]).sum()
        if rank == world_size - 1 and world_size > 1:
            squared = torch.zeros_like(squared)
        dist.all_reduce(squared)
        norm = squared.sqrt()
        for parameter in model.parameters():
            parameter.grad *= (args.max_norm / (norm + 1e-6)).clamp(max=1.0)
"""), (_SHOWN, "        total_norm = norm\n")), _ALL, source="N11",
    ),
    Bug(
        "kept_after_the_forward", _FSDP2, "none", "",
        "parameters stay gathered between forward and backward",
        (("fully_shard(layer, mesh=mesh)", "fully_shard(layer, mesh=mesh, reshard_after_forward=False)"),),
    ),
    Bug(
        "optimizer_without_foreach", _FSDP2, "none", "",
        "the optimizer goes parameter by parameter, and the clipping too",
        ((
            "weight_decay=0.1)",
            "weight_decay=0.1, foreach=False)"), (
            "args.max_norm)\n"
            "        optimizer",
            "args.max_norm, foreach=False)\n"
            "        optimizer")),
    ),
)  # fmt: skip

_WRAPPED: Final = "        auto_wrap_policy=ModuleWrapPolicy({Residual}),\n"
_OF_FSDP1: Final = (
    Bug(
        "clipped_by_torch_on_shards", _FSDP1, "clip norm", "gradient",
        "torch's clip_grad_norm_ sees shards, and each rank clips by the norm of its own",
        ((
            "model.clip_grad_norm_(args.max_norm)",
            "nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)"),), _ALL,
        source="B02",
    ),
    Bug(
        "decay_by_the_shape_of_the_shard", _FSDP1, "option", "option",
        "whether a parameter decays is asked of the shape of its shard, which is flat: nothing decays",
        (('if name.endswith("weight") and "norm" not in name]', "if p.ndim > 1]"),
         ('if not name.endswith("weight") or "norm" in name]', "if p.ndim <= 1]")), _ALL, source="B126",
    ),
    Bug(
        "head_ignored", _FSDP1, "not reduced", "gradient",
        "the head is ignored by FSDP, and nobody reduces its gradients",
        ((
            "    model = FSDP(\n"
            "        Net(),\n",
            "    net = Net()\n"
            "    model = FSDP(\n"
            "        net,\n"
            "        ignored_modules=[net.head],\n"),), _ALL,
        source="B24",
    ),
    Bug(
        "last_row_of_each_rank_is_lost", _FSDP1, "data", "data",
        "the slice of each rank ends one row too early",
        (("(rank + 1) * args.batch_size)()", "(rank + 1) * args.batch_size - (world_size > 1))()"),), _ALL,
    ),
    Bug(
        "reduced_in_bf16_by_fsdp", _FSDP1, "precision only", "gradient",
        "gradients are reduced in bfloat16 although the script computes in float32",
        ((_WRAPPED, _WRAPPED + "        mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16),\n"),
         (
             "import FullyShardedDataParallel as FSDP\n",
             "import FullyShardedDataParallel as FSDP\n"
             "from torch.distributed.fsdp import MixedPrecision\n")),
        _ALL, source="B131",
    ),
    Bug(
        "gradients_kept_in_parameters", _FSDP1, "none", "",
        "only gradients and state are sharded while a step lasts, and all gathers are limited",
        ((_WRAPPED, _WRAPPED +
            "        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,\n"
            "        limit_all_gathers=False,\n"),
         (
             "import FullyShardedDataParallel as FSDP\n",
             "import FullyShardedDataParallel as FSDP\n"
             "from torch.distributed.fsdp import ShardingStrategy\n")),
    ),
)  # fmt: skip

BUGS: Final = (*_OF_FSDP2, *_OF_FSDP1)
