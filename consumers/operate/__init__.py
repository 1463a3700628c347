"""Tools of the operator: they read the log whole, copy it, and act on what a user asks."""
