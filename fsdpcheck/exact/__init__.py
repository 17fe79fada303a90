"""Exact arithmetic: grids and bits, sums of four squares, what operators do to exactness, surrogates of real functions.

Nothing here knows of cases, ranks or adapters; ``fsdpcheck.oracle.certificate`` applies it to a case.
"""
