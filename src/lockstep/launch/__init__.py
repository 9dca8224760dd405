"""Starts the ranks of this machine, and waits until the last has ended."""
