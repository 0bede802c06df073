"""What a placement costs the scheduler: the policy alone, and the whole service over gRPC."""
