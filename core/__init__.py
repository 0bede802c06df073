"""The vocabulary that every process shares. Imports no torch."""
