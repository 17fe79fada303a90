"""The laws: one law a function, one chapter a file."""

if __name__ != "fsdpcheck.properties":  # a second copy of the laws would be registered twice
    raise ImportError(f"import this package as fsdpcheck.properties, never as {__name__}: one module object a file")
