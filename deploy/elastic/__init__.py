"""A worker that serves either role, and turns from one to the other with the model in memory."""
