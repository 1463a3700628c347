-- Which groups and batches did a step train on, with which rewards, and where do they lie in the log?
-- title: Inputs
WITH
    used AS
    (
        SELECT run_id, inputs.group_id AS group_id, inputs.topic AS source, inputs.partition AS part, inputs.offset AS place
        FROM
        (
            SELECT *
            FROM train_steps
            WHERE step = toInt64OrNull({step:String}) AND ({run:String} = '' OR run_id = {run:String})
            ORDER BY _offset
            LIMIT 1
        )
        ARRAY JOIN inputs
    ),
    made AS
    (
        SELECT group_id, toInt64(_partition) AS part, _offset AS place, environment, mean_reward, members.reward AS rewards
        FROM `groups`
        WHERE (_partition, _offset) IN (SELECT part, place FROM used WHERE source = 'groups')
    )
SELECT
    u.run_id AS run_id,
    u.group_id AS group_id,
    g.environment AS environment,
    length(g.rewards) AS rollouts,
    round(g.mean_reward, 4) AS mean_reward,
    arrayMap(reward -> round(reward, 4), g.rewards) AS rewards,
    u.source AS topic,
    u.part AS partition,
    u.place AS offset
FROM used AS u
LEFT JOIN made AS g ON g.group_id = u.group_id AND g.part = u.part AND g.place = u.place
ORDER BY partition, offset
LIMIT 1000
