-- What was one optimizer step: its inputs, settings, result and position in the log?
-- title: The step
-- plot: record
SELECT
    run_id,
    step,
    version,
    parent_version,
    objective,
    learning_rate,
    seed,
    config_hash,
    length(inputs.group_id) AS inputs_trained,
    length(exclusions.group_id) AS inputs_excluded,
    rollouts,
    tokens,
    round((toUnixTimestamp64Micro(finished_at) - toUnixTimestamp64Micro(started_at)) / 1e6, 3) AS seconds,
    started_at,
    finished_at,
    fingerprint,
    parent_fingerprint,
    _topic AS topic,
    _partition AS partition,
    _offset AS offset
FROM train_steps
WHERE step = toInt64OrNull({step:String}) AND ({run:String} = '' OR run_id = {run:String})
ORDER BY _offset
LIMIT 1
