"""Environments: what poses tasks to the policy and scores them, native and by adapter."""
