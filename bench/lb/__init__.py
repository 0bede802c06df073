"""What the load balancers of deploy/lb cost, and how they spread."""
