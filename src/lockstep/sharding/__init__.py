"""Where state lives and how it is updated: a file a strategy."""
