"""Verifies that every strategy trains as a single process does: run, compare, explain deviations."""
