"""Faults at random in a run that recovers by itself, and the proof that it ends as the undisturbed one."""
