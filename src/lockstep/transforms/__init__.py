"""Module -> module, before sharding, in the order that they ask for."""
