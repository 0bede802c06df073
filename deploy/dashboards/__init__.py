"""Grafana dashboards: what they show is data here, and `generate` writes the JSON beside it."""
