"""Explains where the time of a run goes, from the traces of its profiler."""
