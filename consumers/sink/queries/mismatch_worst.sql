-- On which tokens were sampler and trainer farthest apart: both logprobs, version, replica, experts, and where the token lies?
-- title: Tokens of the largest mismatch
SELECT
    run_id,
    step,
    worst.record_id AS record_id,
    worst.segment AS segment,
    worst.position AS position,
    worst.turn AS turn,
    worst.token_id AS token_id,
    worst.sampler_logprob AS sampler_logprob,
    worst.trainer_logprob AS trainer_logprob,
    abs(trainer_logprob - sampler_logprob) AS abs_dlogp,
    worst.weight AS weight,
    worst.version AS version,
    worst.lag AS policy_lag,
    worst.replica_id AS replica_id,
    worst.environment AS environment,
    worst.sampler_experts AS sampler_experts,
    worst.trainer_experts AS trainer_experts
FROM (SELECT * FROM train_mismatch ORDER BY _offset LIMIT 1 BY run_id, step)
ARRAY JOIN worst
ORDER BY run_id, abs_dlogp DESC, step, record_id, segment, position
LIMIT 50 BY run_id
