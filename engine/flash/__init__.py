"""Attention by a flash-attention package, where one is installed."""
