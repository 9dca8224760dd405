"""What is trained and what for: models, their initial values, objectives. Nothing here knows of ranks."""
