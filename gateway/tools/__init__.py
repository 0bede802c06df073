"""Tools: how a model is told of them, and how its calls are read from what it writes."""
