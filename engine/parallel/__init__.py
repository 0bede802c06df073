"""Tensor parallelism: one model over several ranks, each a process with a slice of every layer."""
