"""Reads prompts: computes their KV and hands it over to decode workers."""
