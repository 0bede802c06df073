"""Writes answers: receives a prompt's KV, decodes in continuous batches, streams tokens."""
