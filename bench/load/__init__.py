"""Load on an OpenAI-compatible server: workloads, a client, statistics."""
