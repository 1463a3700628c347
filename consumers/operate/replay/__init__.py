"""Replay of the log: what is selected, how it is put in order and paced, and where the copies lie."""
