"""The ledger of rollouts and the audit of a whole log: what every rollout, step, version and answer came to, derived
from the topics alone."""
