-- What did a step read and not train on, and why?
-- title: Exclusions
SELECT
    run_id,
    exclusions.reason AS reason,
    exclusions.group_id AS group_id,
    exclusions.rollouts AS rollouts,
    exclusions.topic AS topic,
    exclusions.partition AS partition,
    exclusions.offset AS offset
FROM
(
    SELECT *
    FROM train_steps
    WHERE step = toInt64OrNull({step:String}) AND ({run:String} = '' OR run_id = {run:String})
    ORDER BY _offset
    LIMIT 1
)
ARRAY JOIN exclusions
ORDER BY reason, partition, offset
LIMIT 1000
