"""Measures what a run's devices can do."""
