-- What reward did the rollouts of each environment earn that each step trained on? Mean with its 95 % interval.
-- title: Reward by environment
-- plot: line
-- x: step
-- y: reward
-- low: reward_low
-- high: reward_high
-- by: environment
-- unit: mean reward
-- records: step_inputs
SELECT
    s.run_id AS run_id,
    s.step AS step,
    g.environment AS environment,
    count() AS groups,
    sum(g.n) AS rollouts,
    round(sum(g.total) / rollouts, 4) AS reward,
    round(1.96 * sqrt(greatest(0, sum(g.squares) / rollouts - pow(sum(g.total) / rollouts, 2)) / nullIf(rollouts - 1, 0)), 4) AS margin,
    round(reward - margin, 4) AS reward_low,
    round(reward + margin, 4) AS reward_high,
    round(sum(g.solved) / rollouts, 4) AS success
FROM
(
    SELECT run_id, step, cityHash64(run_id, inputs.partition, inputs.offset) AS mark
    FROM
    (
        SELECT run_id, step, inputs.partition, inputs.offset
        FROM train_steps
        WHERE {run:String} = '' OR run_id = {run:String}
        ORDER BY _offset
        LIMIT 1 BY run_id, step
    )
    ARRAY JOIN inputs
) AS s
INNER JOIN
(
    SELECT
        cityHash64(run_id, toInt64(_partition), _offset) AS mark,
        environment,
        arrayMap(reward -> ifNull(reward, 0), members.reward) AS rewards,
        length(rewards) - countEqual(members.reward, NULL) AS n,
        arraySum(rewards) AS total,
        arraySum(reward -> reward * reward, rewards) AS squares,
        countEqual(members.success, true) AS solved
    FROM `groups`
    WHERE {run:String} = '' OR run_id = {run:String}
) AS g ON g.mark = s.mark
GROUP BY run_id, step, environment
ORDER BY run_id, step, environment
