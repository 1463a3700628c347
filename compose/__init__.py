"""How the pieces are put together: configuration, the command line, the local stack and the demonstration."""
