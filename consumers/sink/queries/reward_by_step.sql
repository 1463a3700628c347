-- What reward did the rollouts earn that each optimizer step trained on?
-- title: Reward by optimizer step
-- plot: line
-- x: step
-- y: reward, success
SELECT
    s.run_id AS run_id,
    s.step AS step,
    any(s.learning_rate) AS learning_rate,
    countDistinct(g.group_id) AS groups,
    count(g.reward) AS rollouts,
    round(avg(g.reward), 4) AS reward,
    round(avg(toFloat64(g.success)), 4) AS success,
    any(s.tokens) AS tokens
FROM
(
    SELECT run_id, step, learning_rate, tokens, inputs.group_id AS group_id, inputs.partition AS part, inputs.offset AS place
    FROM (SELECT * FROM train_steps ORDER BY _offset LIMIT 1 BY run_id, step)
    ARRAY JOIN inputs
) AS s
LEFT JOIN
(
    SELECT group_id, toInt64(_partition) AS part, _offset AS place, members.reward AS reward, members.success AS success
    FROM `groups`
    ARRAY JOIN members
) AS g ON g.group_id = s.group_id AND g.part = s.part AND g.place = s.place
GROUP BY run_id, step
ORDER BY run_id, step
