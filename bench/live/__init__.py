"""Promises that only a running cluster can be asked about: overload, and a flooding tenant."""
