"""Sampling from replicas: checked completions, choice of the replica, and segments of the sampled tokens."""
