"""The claims ledger: what is said about sharded, private training, each row a check with a verdict and its numbers."""
