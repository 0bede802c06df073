"""One process's inference: model, weights, KV cache, batching, sampling. Knows no network.

This package's root imports nothing, so that torch-free parts (`engine.prepare`, `engine.batching`,
`engine.block_manager`) stay light. A process's event loop owns all bookkeeping; one compute thread
owns the tensors.
"""
