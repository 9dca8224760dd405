"""Runs the product's own code on an accelerator that isn't there, as one rank of as many as asked for."""
