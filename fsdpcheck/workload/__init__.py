"""Workload: the model, batches, losses and optimizer that a case describes, equal for ranks and oracle."""
