"""Environments, native and by adapter: they give tasks to the policy and score the results."""
