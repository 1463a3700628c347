-- On which tokens of one rollout were sampler and trainer far apart, among the worst of their step?
-- title: Worst tokens
-- `run` may be empty.
SELECT DISTINCT
    worst.segment AS segment,
    worst.position AS position,
    worst.sampler_logprob AS sampler_logprob,
    worst.trainer_logprob AS trainer_logprob
FROM (SELECT * FROM train_mismatch ORDER BY _offset LIMIT 1 BY run_id, step)
ARRAY JOIN worst
WHERE worst.record_id = {rollout_id:String} AND ({run:String} = '' OR run_id = {run:String})
ORDER BY segment, position
LIMIT 2000
