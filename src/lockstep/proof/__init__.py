"""Verification that every strategy trains as a single process does: run, compare, and explain each deviation.

cases             choose the runs and their configs
runner            launch the ranks, run the reference and then all cases, and survive those that crash
comparison        record the reference on one rank, and compare each run with it, update by update
tensors           compare gradients and weights with those on disk
rank_dependence   find what makes a run depend on the number of ranks by design
evidence          what is recorded of each update
tolerances        how much may differ, and why
diagnosis         the first deviation and its likely cause
rows              the result of each run, as text and as JSON
"""
