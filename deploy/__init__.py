"""Composition: puts the parts together as processes. This folder may import every other."""
