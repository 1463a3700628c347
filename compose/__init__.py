"""The assembly of the parts: configuration, the command line, the local stack and the demonstration."""
