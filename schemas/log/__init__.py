"""Clients of the log: reader, consumer group members, producers, administration."""
