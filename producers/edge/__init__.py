"""The HTTP edge of the product: the router, which serves its traffic, and the gateway, which takes its feedback."""
