"""The reference implementation: flat-parameter sharding with ghost clipping, written to be read."""

if __name__ != "fsdpcheck.impl":  # a second copy of the code: a fault planted in one is invisible in the other
    raise ImportError(f"import this package as fsdpcheck.impl, never as {__name__}: one module object a source file")
