-- When was a step planned, by which trainer, on how many inputs? A second plan means that the trainer was started again.
-- title: Plans
SELECT
    run_id,
    at,
    trainer,
    parent_version,
    length(inputs.group_id) AS inputs,
    length(exclusions.group_id) AS exclusions,
    seed,
    config_hash,
    _topic AS topic,
    _partition AS partition,
    _offset AS offset
FROM step_plans
WHERE step = toInt64OrNull({step:String}) AND ({run:String} = '' OR run_id = {run:String})
ORDER BY run_id, offset
LIMIT 100
