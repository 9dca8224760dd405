"""How gradients are reduced and parameters updated, one file a strategy; and the state of the model, once for all."""
