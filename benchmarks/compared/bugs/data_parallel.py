"""Bugs of scripts with DistributedDataParallel: data, accumulation, options, sharded optimizers."""

from __future__ import annotations

from typing import Final

from benchmarks.compared.planted import Bug

_MLP_START: Final = "start = step * args.batch_size * world_size + rank * args.batch_size"
_MLP_BACKWARD: Final = "        loss.backward()\n        optimizer.step()\n\n"
_MICRO: Final = """            with nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(inputs[rows]), labels[rows]) / args.accumulate
                loss.backward()
"""
_WAVES: Final = "dataset = Waves(args.batch_size * world_size * args.steps, args.seed)"
_SAMPLER: Final = "DistributedSampler(dataset, shuffle=False)"
_ALL: Final = (2, 3, 4)

_MLP: Final = (
    Bug(
        "rows_overlap", "ddp_mlp", "data", "data",
        "each rank starts one row after the rank before, so most rows of a step are used by several ranks",
        ((_MLP_START, "start = step * args.batch_size * world_size + rank"),), _ALL,
    ),
    Bug(
        "all_ranks_take_the_same_rows", "ddp_mlp", "data", "data",
        "every rank trains on the rows of rank 0; the others of the global batch are never used",
        ((_MLP_START, "start = step * args.batch_size * world_size"),), _ALL, source="B68",
    ),
    Bug(
        "data_made_by_rank", "ddp_mlp", "data", "data",
        "the data set is made with a seed that depends on the rank",
        (("make_data(args.seed + 1)", "make_data(args.seed + 1 + rank)"),), _ALL, source="B67",
    ),
    Bug(
        "labels_shifted_on_a_rank", "ddp_mlp", "labels", "labels",
        "the inputs are those of one rank, but every rank other than 0 pairs them with targets of other rows",
        (("targets[rows])\n        optimizer", "targets[rows].roll(rank, dims=0))\n        optimizer"),), _ALL,
    ),
    Bug(
        "sum_over_local_rows", "ddp_mlp", "factor", "gradient",
        "the loss is a sum over the rank's rows, which DDP averages over ranks: gradients are W times too small",
        ((
            "F.mse_loss(model(inputs[rows]), targets[rows])",
            'F.mse_loss(model(inputs[rows]), targets[rows], reduction="sum") / 96'),),
        _ALL, source="B18",
    ),
    Bug(
        "averaged_twice", "ddp_mlp", "factor", "gradient",
        "DDP has averaged the gradients, and they are divided by W once more",
        ((_MLP_BACKWARD,
            "        loss.backward()\n"
            "        for parameter in model.parameters():\n"
            "            parameter.grad /= world_size\n"
            "        optimizer.step()\n"
            "\n"),),
        _ALL, source="B18",
    ),
    Bug(
        "forward_past_the_wrapper", "ddp_mlp", "not reduced", "gradient",
        "the forward is that of the module inside DDP, so gradients are never reduced and replicas drift apart",
        (("F.mse_loss(model(inputs[rows])", "F.mse_loss(model.module(inputs[rows])"),), _ALL,
    ),
    Bug(
        "learning_rate_times_ranks", "ddp_mlp", "option", "option",
        "the learning rate is scaled by the number of ranks although the global batch is not",
        (("lr=args.lr, momentum=0.9)", "lr=args.lr * world_size, momentum=0.9)"),), _ALL,
    ),
    Bug(
        "only_rank_0_steps", "ddp_mlp", "steps", "steps",
        "the optimizer steps on rank 0 only, and the parameters of the others stay as they were",
        ((_MLP_BACKWARD, "        loss.backward()\n        if rank == 0:\n            optimizer.step()\n\n"),), _ALL,
    ),
    Bug(
        "spikes_skipped_by_each_rank", "ddp_mlp", "steps", "steps",
        "each rank skips the step by its own loss, so ranks take different numbers of steps from step 1 on",
        ((_MLP_BACKWARD,
            "        loss.backward()\n"
            "        if loss.item() < 0.95:\n"
            "            optimizer.step()\n"
            "\n"),), (3, 4),
        source="B60",
    ),
    Bug(
        "head_initialised_after_wrapping", "ddp_mlp", "replicas differ", "parameter",
        "the last layer is initialised after DDP broadcast the parameters, with a seed by rank",
        ((
            "    model = DDP(make_model())\n",
            "    model = DDP(make_model())\n"
            "    torch.manual_seed(args.seed + rank)\n"
            "    model.module[-1].reset_parameters()\n"),),
        _ALL, source="B161",
    ),
    Bug(
        "hand_made_momentum_reset_by_rank", "ddp_mlp", "state", "state",
        "rank 0 empties the optimizer's state after step 2, the others keep theirs",
        ((_MLP_BACKWARD,
            "        loss.backward()\n"
            "        optimizer.step()\n"
            "        if step == 2 and world_size > 1 and rank == 0:\n"
            "            optimizer.state.clear()\n"
            "\n"),),
        _ALL,
    ),
)  # fmt: skip

_ACCUMULATE: Final = (
    Bug(
        "loss_not_divided", "ddp_accumulate", "factor", "norm",
        "the loss is not divided by the number of micro-batches, which depends on the number of ranks",
        (("labels[rows]) / args.accumulate", "labels[rows])"),), _ALL,
    ),
    Bug(
        "loss_not_divided_without_clipping", "ddp_accumulate", "factor", "gradient",
        "the loss is not divided by the number of micro-batches, which depends on the number of ranks",
        ((
            "labels[rows]) / args.accumulate",
            "labels[rows])"), (
            '"--clip", type=float, default=1.0',
            '"--clip", type=float, default=1e9'),
         ('"--lr", type=float, default=0.1', '"--lr", type=float, default=0.01')), _ALL,
    ),
    Bug(
        "never_synchronised", "ddp_accumulate", "not reduced", "gradient",
        "no_sync is on for the last micro-batch too, so gradients are never reduced",
        (("last = micro == args.accumulate - 1", "last = micro == args.accumulate"),), _ALL,
    ),
    Bug(
        "synchronised_in_the_first", "ddp_accumulate", "not reduced", "gradient",
        "only the first micro-batch is reduced; what the later ones add stays with each rank",
        (("last = micro == args.accumulate - 1", "last = micro == 0"),), _ALL,
    ),
    Bug(
        "flag_set_after_the_forward", "ddp_accumulate", "not reduced", "gradient",
        "DDP reads the flag in the forward, and it is set between forward and backward: the last micro-batch is not "
        "reduced",
        ((_MICRO, """            loss = F.cross_entropy(model(inputs[rows]), labels[rows]) / args.accumulate
            model.require_backward_grad_sync = last
            loss.backward()
"""),), _ALL, source="B28",
    ),
    Bug(
        "zero_grad_in_the_loop", "ddp_accumulate", "last micro-batch only", "gradient",
        "gradients are set to zero before every micro-batch, so the last one counts alone",
        ((
            "            last = micro ==",
            "            optimizer.zero_grad()\n"
            "            last = micro =="),), _ALL, source=
            "B26",
    ),
    Bug(
        "position_moves_by_one_rank", "ddp_accumulate", "data", "data",
        "the position in the data moves by the rows of one rank, so ranks use rows again that others have used",
        (("position += world_size * args.micro_batch_size", "position += args.micro_batch_size"),), _ALL,
    ),
    Bug(
        "clipped_in_every_micro_batch", "ddp_accumulate", "clip norm", "gradient",
        "what each rank has accumulated is clipped after every micro-batch, by its own norm, before it is reduced",
        ((
            "            total += loss.detach()\n",
            "            total += loss.detach()\n"
            "            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)\n"),),
        _ALL,
    ),
    Bug(
        "divided_by_all_micro_batches", "ddp_accumulate", "factor", "gradient",
        "the loss is divided by the micro-batches of all ranks, and DDP divides by the ranks again",
        (("labels[rows]) / args.accumulate", "labels[rows]) / (args.accumulate * world_size)"),), _ALL, source="B18",
    ),
)  # fmt: skip

_ZERO: Final = (
    Bug(
        "no_sampler", "zero_optimizer", "data", "data",
        "the loader has no DistributedSampler: every rank goes through the whole data set, in W times as many steps",
        (("batch_size=args.batch_size, sampler=sampler)", "batch_size=args.batch_size)"),), _ALL, source="B68",
    ),
    Bug(
        "sampler_of_rank_0", "zero_optimizer", "data", "data",
        "the sampler of every rank is that of rank 0",
        ((_SAMPLER, "DistributedSampler(dataset, num_replicas=world_size, rank=0, shuffle=False)"),), _ALL,
    ),
    Bug(
        "shuffled_by_rank", "zero_optimizer", "data", "data",
        "each rank shuffles with its own seed, so rows are used twice and others never",
        ((_SAMPLER, "DistributedSampler(dataset, shuffle=True, seed=rank)"),), _ALL, source="B67",
    ),
    Bug(
        "sampler_pads", "zero_optimizer", "data", "data",
        "the size of the data set does not divide, and the sampler repeats rows in the last step",
        ((_WAVES, "dataset = Waves(args.batch_size * world_size * args.steps - 5, args.seed)"),), _ALL, source="B65",
    ),
    Bug(
        "sampler_drops", "zero_optimizer", "data", "data",
        "the size of the data set does not divide, and the sampler drops rows that one rank uses in the last step",
        (
            (_WAVES, "dataset = Waves(args.batch_size * world_size * args.steps - 5, args.seed)"),
            (_SAMPLER, "DistributedSampler(dataset, shuffle=False, drop_last=True)"),
        ), _ALL,
    ),
    Bug(
        "shard_updated_not_broadcast", "zero_optimizer", "not reduced", "parameter",
        "each rank updates its share of the parameters and nobody broadcasts them",
        (
            ("ZeroRedundancyOptimizer(\n        model.parameters(), optimizer_class=torch.optim.Adam, lr",
             "torch.optim.Adam(\n        list(model.parameters())[rank::world_size], lr"),
            ("    optimizer.consolidate_state_dict(to=0)\n", ""),
        ), _ALL,
    ),
    Bug(
        "epsilon_by_rank", "zero_optimizer", "option", "option",
        "ranks other than 0 update their share with another epsilon",
        (("betas=(0.9, 0.98)", "betas=(0.9, 0.98), eps=1e-8 if rank == 0 else 1e-6"),), _ALL,
    ),
)  # fmt: skip

_GROUPS: Final = "parameter_groups(model, args.weight_decay), lr=args.lr"
_SCHEDULE: Final = (
    Bug(
        "scheduler_steps_once_a_rank", "adamw_schedule", "option", "option",
        "the schedule is stepped W times in each step, as for a batch that is not split",
        (("        scheduler.step()\n", "        for _ in range(world_size):\n            scheduler.step()\n"),), _ALL,
    ),
    Bug(
        "decay_of_norms_on_other_ranks", "adamw_schedule", "option", "option",
        "ranks other than 0 decay biases and norms too",
        ((_GROUPS, "parameter_groups(model, args.weight_decay) if rank == 0 else model.parameters(), lr=args.lr"),
         ("betas=(0.9, 0.95), eps=1e-8", "betas=(0.9, 0.95), eps=1e-8, weight_decay=args.weight_decay")), _ALL,
    ),
    Bug(
        "learning_rate_by_root_of_ranks", "adamw_schedule", "option", "option",
        "the learning rate is scaled by the root of the number of ranks",
        ((_GROUPS, "parameter_groups(model, args.weight_decay), lr=args.lr * math.sqrt(world_size)"),), _ALL,
    ),
    Bug(
        "schedule_of_local_samples", "adamw_schedule", "option", "option",
        "the length of the schedule is counted in batches of one rank, so it decays too slowly",
        (("warmup_cosine(step, 2, args.steps)", "warmup_cosine(step, 2, args.steps * world_size)"),), _ALL,
    ),
    Bug(
        "epsilon_by_local_batch", "adamw_schedule", "option", "option",
        "the epsilon of AdamW follows from the batch of one rank",
        (("eps=1e-8", "eps=1e-8 * args.batch_size"),), _ALL,
    ),
    Bug(
        "average_decays_by_ranks", "adamw_schedule", "state", "state",
        "the decay of the averaged weights is raised to the number of ranks",
        (("update_ema(ema, model, args.ema_decay)", "update_ema(ema, model, args.ema_decay**world_size)"),), _ALL,
    ),
    Bug(
        "average_of_rank_0_goes_stale", "adamw_schedule", "state", "state",
        "the averaged weights are updated on the last rank only, and rank 0 evaluates its own, which never move",
        (("        update_ema(ema,", "        if rank == world_size - 1:\n            update_ema(ema,"),), _ALL,
    ),
    Bug(
        "class_weights_of_the_local_batch", "adamw_schedule", "weighting", "gradient",
        "classes are weighted by how often they occur in the rank's own batch",
        ((
            "nn.functional.cross_entropy(ddp(x), y)\n",
            "nn.functional.cross_entropy(ddp(x), y, weight=1 / (1 + torch.bincount(y, minlength=3)))\n"),),
        _ALL, source="B20",
    ),
    Bug(
        "inputs_standardised_by_rank", "adamw_schedule", "data", "data",
        "inputs are standardised by mean and deviation of the rank's own batch",
        ((
            "        y = labels[first",
            "        x = (x - x.mean(dim=0)) / x.std(dim=0)\n"
            "        y = labels[first"),), _ALL,
    ),
)  # fmt: skip

_HARMLESS: Final = (
    Bug(
        "buckets_and_views", "ddp_mlp", "none", "",
        "buckets of another size, gradients as views of them, and no broadcast of buffers",
        ((
            "DDP(make_model())",
            "DDP(make_model(), bucket_cap_mb=0.01, gradient_as_bucket_view=True, broadcast_buffers=False)"),),
    ),
    Bug(
        "zero_grad_to_zero", "ddp_mlp", "none", "",
        "gradients are set to zero instead of None, and the optimizer goes parameter by parameter",
        ((
            "optimizer.zero_grad()",
            "optimizer.zero_grad(set_to_none=False)"), (
            "momentum=0.9)",
            "momentum=0.9, foreach=False)")),
    ),
    Bug(
        "averaged_again_as_they_are_equal", "ddp_mlp", "none", "",
        "gradients that DDP has averaged are averaged over ranks once more, which leaves them as they are",
        ((_MLP_BACKWARD,
            "        loss.backward()\n"
            "        for parameter in model.parameters():\n"
            "            dist.all_reduce(parameter.grad)\n"
            "            parameter.grad /= world_size\n"
            "        optimizer.step()\n"
            "\n"),),
    ),
    Bug(
        "sharded_by_buckets", "zero_optimizer", "none", "",
        "the sharded optimizer broadcasts parameters as views of one bucket",
        (("lr=args.lr, betas", "parameters_as_bucket_view=True, lr=args.lr, betas"),),
    ),
)  # fmt: skip

BUGS: Final = (*_MLP, *_ACCUMULATE, *_ZERO, *_SCHEDULE, *_HARMLESS)
