"""Verifies that every strategy trains like a single process: run, compare, explain deviations."""
