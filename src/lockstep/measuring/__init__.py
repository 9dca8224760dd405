"""Measures how much memory the ways to save it save on the user's model, and what they cost."""
