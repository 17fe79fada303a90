"""Bugs of the script that averages gradients itself."""

from __future__ import annotations

from typing import Final

from benchmarks.compared.planted import Bug

_REDUCE: Final = "        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)\n"
_AVERAGE: Final = f"    for parameter in model.parameters():\n{_REDUCE}        parameter.grad /= world_size\n"
_CLIP: Final = """        average_gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
"""
_ALL: Final = (2, 3, 4)

BUGS: Final = (
    Bug(
        "sum_for_mean", "tied_lm", "factor", "norm",
        "gradients are summed over ranks and not divided: W times too large, which clipping hides",
        (("        parameter.grad /= world_size\n", ""), (
            "    world_size = dist.get_world_size()\n"
            "    for",
            "    for")), _ALL,
    ),
    Bug(
        "sum_for_mean_without_clipping", "tied_lm", "factor", "gradient",
        "gradients are summed over ranks and not divided: W times too large",
        (("        parameter.grad /= world_size\n", ""), ("    world_size = dist.get_world_size()\n    for", "    for"),
         ('"--lr", type=float, default=0.5', '"--lr", type=float, default=0.02'),
         ('"--clip", type=float, default=1.0', '"--clip", type=float, default=1e9')), _ALL,
    ),
    Bug(
        "biases_not_reduced", "tied_lm", "not reduced", "gradient",
        "only gradients of matrices are averaged; biases and norms keep those of their rank",
        ((_REDUCE, "        if parameter.ndim < 2:\n            continue\n" + _REDUCE),), _ALL, source="N13",
    ),
    Bug(
        "tied_weight_summed_twice", "tied_lm", "factor", "gradient",
        "the tied weight occurs twice in the list that is summed, so its gradient is W times too large",
        ((_AVERAGE, "    for _, parameter in model.named_parameters(remove_duplicate=False):\n" + _REDUCE
          + "    for parameter in model.parameters():\n        parameter.grad /= world_size\n"),), _ALL, source="B83",
    ),
    Bug(
        "parameters_not_broadcast", "tied_lm", "replicas differ", "parameter",
        "each rank begins with its own parameters, for those of rank 0 are not broadcast",
        (("    broadcast_parameters(model)\n", ""),), _ALL, source="B161",
    ),
    Bug(
        "only_matrices_broadcast", "tied_lm", "replicas differ", "parameter",
        "only matrices of rank 0 are broadcast; biases begin with another value on each rank",
        ((
            "        dist.broadcast(tensor, src=0)",
            "        if tensor.ndim > 1:\n"
            "            dist.broadcast(tensor, src=0)"),), _ALL,
    ),
    Bug(
        "clipped_before_averaging", "tied_lm", "clip norm", "gradient",
        "each rank clips its own gradients by their own norm, and averages them afterwards",
        ((_CLIP, """        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        average_gradients(model)
"""),), _ALL, source="B103",
    ),
    Bug(
        "gradients_of_rank_0", "tied_lm", "one rank", "gradient",
        "the gradients of rank 0 are broadcast instead of averaged",
        ((_REDUCE + "        parameter.grad /= world_size\n", "        dist.broadcast(parameter.grad, src=0)\n"),
         ("    world_size = dist.get_world_size()\n    for", "    for")), _ALL,
    ),
    Bug(
        "last_rank_is_left_out", "tied_lm", "one rank", "gradient",
        "the last rank sends zeros in the place of its gradients, and the sum is divided by all ranks",
        ((_REDUCE,
            "        if dist.get_rank() == world_size - 1 and world_size > 1:\n"
            "            parameter.grad.zero_()\n" + _REDUCE),),
        _ALL,
    ),
    Bug(
        "reduced_within_pairs", "tied_lm", "wrong group", "gradient",
        "gradients are averaged within pairs of ranks, as on a node of two, and never between pairs",
        (("    corpus = text(", """    first = rank // 2 * 2
    groups = [
        dist.new_group(list(range(start, min(start + 2, world_size)))) for start in range(0, world_size, 2)
    ]
    node = groups[first // 2]
    corpus = text("""),
         ("        average_gradients(model)\n", """        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=node)
            parameter.grad /= dist.get_world_size(node)
""")), (3, 4),
    ),
    Bug(
        "reduced_in_bf16", "tied_lm", "precision only", "gradient",
        "gradients are reduced in bfloat16 in a script of float32",
        ((_REDUCE, """        half = parameter.grad.bfloat16()
        dist.all_reduce(half)
        parameter.grad.copy_(half)
"""),), _ALL, source="B135",
    ),
    Bug(
        "one_rank_sends_bf16", "tied_lm", "precision only", "gradient",
        "rank 1 rounds its gradients to bfloat16 before they are reduced",
        ((_REDUCE,
            "        if dist.get_rank() == 1:\n"
            "            parameter.grad.copy_(parameter.grad.bfloat16())\n" + _REDUCE),), _ALL,
    ),
    Bug(
        "sequences_of_other_lengths_weigh_alike", "tied_lm", "weighting", "gradient",
        "labels of token 0 to 9 are ignored, and means over unequal numbers of labels are averaged with equal weight",
        (("F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())\n        loss.backward",
              "F.cross_entropy(model(ids).flatten(0, 1), labels.where(labels > 9, -100).flatten())\n"
              "        loss.backward"),), _ALL,
        source="B20",
    ),
    Bug(
        "hidden_layer_frozen_on_a_rank", "tied_lm", "one rank", "gradient",
        "rank 1 trains with the recurrent weights detached, so its part of their gradient is zero",
        ((
            "        loss.backward()\n",
            "        if rank == 1:\n"
            "            for weight in model.rnn.parameters():\n"
            "                weight.register_hook(torch.zeros_like)\n"
            "        loss.backward()\n"),),
        _ALL,
    ),
    Bug(
        "averaged_in_reverse", "tied_lm", "none", "",
        "gradients are divided first, and averaged in the reverse order of parameters",
        ((_AVERAGE,
            "    for parameter in reversed(list(model.parameters())):\n"
            "        parameter.grad /= world_size\n" + _REDUCE),),
    ),
    Bug(
        "averaged_in_one_buffer", "tied_lm", "none", "",
        "gradients are copied into one buffer, averaged at once and copied back",
        ((_AVERAGE, """    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world_size
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
"""),),
    ),
)  # fmt: skip
