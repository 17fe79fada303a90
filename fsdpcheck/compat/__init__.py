"""Private names of torch, hypothesis and triton, each in one module that says on which versions it was tried."""
