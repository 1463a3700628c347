"""Reading a branch's weight chain: what the log holds, whether it is sound, and any version as files.

Nothing here needs an engine, a trainer or a replica to run: the log and the object store are enough.
"""
