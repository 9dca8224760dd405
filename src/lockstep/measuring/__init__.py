"""Measures what ways to save memory save, and cost, on the user's model."""
