-- How did every rollout end: trained once, excluded with a reason, failed, or still open? Held-out tasks are never trained.
WITH
    members AS
    (
        SELECT arrayJoin(members.rollout_id) AS rollout_id, group_id, toInt64(_partition) AS part, _offset AS place
        FROM `groups`
    ),
    steps AS (SELECT * FROM train_steps ORDER BY _offset LIMIT 1 BY run_id, step),
    read AS
    (
        SELECT inputs.group_id AS group_id, inputs.partition AS part, inputs.offset AS place, 'trained' AS ending
        FROM steps
        ARRAY JOIN inputs
        UNION ALL
        SELECT exclusions.group_id, exclusions.partition, exclusions.offset, concat('excluded: ', exclusions.reason)
        FROM steps
        ARRAY JOIN exclusions
    ),
    endings AS
    (
        SELECT
            m.rollout_id AS rollout_id,
            countIf(r.ending = 'trained') AS trained,
            countIf(r.ending != '') AS ended,
            anyIf(r.ending, r.ending != '') AS ending
        FROM members AS m
        LEFT JOIN read AS r ON r.group_id = m.group_id AND r.part = m.part AND r.place = m.place
        GROUP BY rollout_id
    ),
    made AS
    (
        SELECT run_id, rollout_id, any(mode) AS mode, any(status) AS status, any(failure) AS failure, any(task_id) AS task_id
        FROM rollouts
        GROUP BY run_id, rollout_id
    )
SELECT
    m.run_id AS run_id,
    m.mode AS mode,
    multiIf(
        e.ended > 1, 'more than one ending',
        e.ended = 1 AND e.ending != 'trained', e.ending,
        m.status = 'failed', 'failed',
        e.ended = 1, e.ending,
        e.rollout_id != '', 'open: in a group',
        'open: in no group') AS ending,
    count() AS rollouts,
    countIf(e.trained > 1) AS trained_twice,
    countIf(e.trained > 0 AND m.task_id IN (SELECT task_id FROM tasks WHERE mode = 'eval')) AS held_out_trained
FROM made AS m
LEFT JOIN endings AS e ON e.rollout_id = m.rollout_id
GROUP BY run_id, mode, ending
ORDER BY run_id, mode, ending
