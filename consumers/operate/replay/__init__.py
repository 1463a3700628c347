"""Replay of the log: the selection of records, their order and pace, and the topics of the copies."""
