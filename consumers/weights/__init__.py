"""Reader of a branch's weight chain: lists it, verifies it, and writes any version as files.

No engine, trainer or replica has to run: the log and the object store are enough.
"""
