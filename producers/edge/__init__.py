"""The HTTP servers for a product: the router, which answers its requests, and the gateway, which takes its feedback."""
