"""Traces from one event of the product to the weights that it changed, from the log alone."""
