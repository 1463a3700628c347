"""From one event of the product to the weights that it changed, by the log alone."""
