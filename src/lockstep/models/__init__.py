"""Models, their initial values, and objectives; independent of ranks."""
