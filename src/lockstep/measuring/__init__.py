"""What ways to save memory save, and cost, measured on the user's own model."""
