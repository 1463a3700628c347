"""The demonstration: the whole loop on one machine, from one command."""
