"""Runs a command line of Lockstep elsewhere: a file for each place, and a line in `registry`."""
