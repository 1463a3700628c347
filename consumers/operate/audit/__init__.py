"""The audit of a whole log: the end of every rollout, step, version and answer, from the topics alone."""
