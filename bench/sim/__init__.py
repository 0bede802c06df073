"""A cluster in virtual time: the scheduler's own desk, the engine's own planner and block manager.

What a step, a transfer and a message take comes from a timing model; everything that decides is the
code that serves. docs/simulation.md says what is modelled and what is not.
"""
