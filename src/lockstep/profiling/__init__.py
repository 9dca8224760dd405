"""Explains where the time and the memory of a run go: its traces, its data loader, its tensors."""
