"""Clients of the log: one reader, group members, producers, administration."""
