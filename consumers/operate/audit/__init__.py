"""The audit of a whole log: how every rollout, step, version and answer ended, from the topics alone."""
