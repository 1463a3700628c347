"""The rollout worker: tasks from the log are played against the replicas, and become rollouts."""
