"""Checkpoints: saved in the background, verified byte by byte, loadable on any number of ranks."""
