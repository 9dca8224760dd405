"""Who starts the ranks, and stays until the last has ended."""
