"""Chat: messages to token ids and back, the same in rollouts, in the serving path and in mid-training."""
