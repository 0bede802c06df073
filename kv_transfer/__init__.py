"""Moving KV blocks between two processes: the hand-off's state machine, transports, integrity.

Knows blocks as ranges of bytes, never the engine; torch only where a transport is made of it.
"""
