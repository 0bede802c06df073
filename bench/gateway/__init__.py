"""What the gateway costs, with a scripted token source in the place of the cluster."""
