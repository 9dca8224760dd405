"""The parts that all packages share: errors, records, progress, keys, and the protocols between packages."""
