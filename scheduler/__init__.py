"""The central queue: who waits, who is there, and who goes where. Imports no torch."""
