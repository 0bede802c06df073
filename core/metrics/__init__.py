"""What each process counts and measures, and how Prometheus reads it. Imports no torch."""
