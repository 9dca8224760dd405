"""How a batch becomes a gradient."""
