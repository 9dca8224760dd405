"""The parts that all packages share: failures, progress, keys, records, and the protocols between packages."""
