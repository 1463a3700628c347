"""The way to the replicas: checked completions, which replica is asked, and segments of what it sampled."""
