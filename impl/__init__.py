"""The reference implementation: sharded training with ghost clipping, written to be read.

Reading order: ``sharding/`` (``flat_buffer``: one buffer, its shards and padding; ``flat_unit``: gather, free, reduce;
``flat_model``, what happens around forward and backward; ``protocol``, what a training step needs of a sharded
model; ``fsdp2_model``, the same on ``fully_shard``; ``collectives``, the only file that talks to other ranks),
``norms/`` (per-sample squared norms, one layer type a file), ``kernels/`` (the norms of a Linear without its
gradients), ``clipping/`` (``layers`` and ``records``: which layers count, what a forward leaves; ``recorder``:
activations and backprops; ``tied``: parameters used several times; ``coverage``: nothing trains uncounted;
``independence``: no sample reaches another's loss; ``aggregate`` and ``batch_layout``: norms over ranks;
``clip_factors``, ``rules`` and ``modes``; ``nonfinite``; ``private_backward``: clipped gradients of a micro-batch),
``noise/``, ``sampling/``, ``trainer`` (the training step); then ``costs/`` (bytes and time) and ``state/`` (saving and
loading at any number of ranks). ``faults/`` plants bugs on purpose.

Files call one another through the module (``clip_factors.factors(...)``), so that a planted fault is seen by every
caller.
"""

if __name__ != "fsdpcheck.impl":  # a second copy of the code: a fault planted in one is invisible in the other
    raise ImportError(f"import this package as fsdpcheck.impl, never as {__name__}: one module object a source file")
