"""The rollout worker: plays tasks from the log against the replicas and writes rollouts."""
