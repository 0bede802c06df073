"""Measurements over a running cluster, seen from outside as a user would see it."""
