-- How content are users with each version, by arm: the mean reward of their interactions and its 95 % interval?
-- title: Satisfaction by arm and version
-- plot: line
-- x: version
-- y: reward
-- by: arm
-- low: low
-- high: high
-- unit: mean reward
-- records: interaction_list
-- The newest outcome of each interaction counts. The interval, mean ± 1.96 s/√n, takes interactions for independent and
-- their mean for normal. Interactions of one user are alike, so it is too narrow where users have many.
SELECT
    run_id,
    branch,
    version_max AS version,
    arm,
    count() AS interactions,
    countIf(e.reward IS NOT NULL) AS rewards,
    round(avg(e.reward), 4) AS reward,
    if(rewards < 2, NULL, round(avg(e.reward) - 1.96 * stddevSamp(e.reward) / sqrt(rewards), 4)) AS low,
    if(rewards < 2, NULL, round(avg(e.reward) + 1.96 * stddevSamp(e.reward) / sqrt(rewards), 4)) AS high
FROM
(
    SELECT run_id, branch, arm, version_max, reward
    FROM outcomes
    WHERE {run:String} = '' OR run_id = {run:String}
    ORDER BY revision DESC, _offset
    LIMIT 1 BY run_id, interaction_id
) AS e
GROUP BY run_id, branch, version, arm
ORDER BY run_id, branch, version, arm
