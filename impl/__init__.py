"""The reference implementation: sharded training with ghost clipping, written to be read.

Reading order: ``flat`` (one buffer, its shards and padding), ``shard`` (a unit: gather, free, reduce), ``wrap`` (a
model of units: what happens around forward and backward), ``sharded`` (what a training step needs of a sharded model),
``per_parameter`` (the same on ``fully_shard``, with ``rows``), ``norms/`` (per-sample squared norms, one layer type a
file), ``kernels/`` (the norms of a Linear without its gradients), ``layers`` and ``records`` (which layers count, what
a forward leaves), ``hooks`` (activations and backprops), ``sharing`` (parameters used several times), ``uses`` (nothing
trains uncounted), ``independence`` (no sample reaches another's loss), ``aggregate`` and ``layout`` (norms over
ranks), ``clip`` and ``clipping`` (factors), ``nonfinite``, ``modes``, ``private`` (clipped gradients of a micro-batch),
``noise`` (and its ``words``), ``sampling`` and ``epochs``, ``step`` (the training step); then ``memory`` and
``profile`` (what it costs), and ``state/`` (saving and loading at any number of ranks). ``collectives`` is the only
file that talks to other ranks. What many need: ``places`` (where a model holds its parameters), ``spans`` (ranges of a
flattened tensor), ``nested`` (tensors in nested outputs). ``fault`` and ``faults/`` plant bugs on purpose.

Files call one another through the module (``clip.factors(...)``), so that a planted fault is seen by every caller.
"""

if __name__ != "fsdpcheck.impl":  # a second copy of the code: a fault planted in one is invisible in the other
    raise ImportError(f"import this package as fsdpcheck.impl, never as {__name__}: one module object a source file")
