"""The tests' own tools: worlds of ranks, runs to compare, faults to plant."""
