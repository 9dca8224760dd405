"""State on disk: saved while training goes on, verified byte by byte, loadable on any number of ranks."""
