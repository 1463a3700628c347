-- Which turns of one rollout were written when they were sampled, by whom and under which version?
-- title: Turns
-- `run` may be empty.
SELECT
    turn,
    replica_id,
    region,
    n_tokens AS tokens,
    arrayStringConcat(arrayMap(v -> toString(v), arrayDistinct(spans.version)), ', ') AS versions,
    finish_reason,
    at,
    worker_id,
    _topic AS topic,
    _partition AS partition,
    _offset AS offset
FROM turns
WHERE rollout_id = {rollout_id:String} AND ({run:String} = '' OR run_id = {run:String})
ORDER BY turn, _offset
LIMIT 1000
