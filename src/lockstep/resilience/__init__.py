"""Checks of updates, and signals."""
