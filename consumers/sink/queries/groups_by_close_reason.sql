-- Why were groups closed, and how full were they?
SELECT
    run_id,
    mode,
    closed_by,
    count() AS groups,
    sum(length(members.rollout_id)) AS rollouts,
    round(avg(length(members.rollout_id) / expected_size), 3) AS filled,
    round(avg(mean_reward), 4) AS reward,
    round(quantile(0.5)((toUnixTimestamp64Micro(closed_at) - toUnixTimestamp64Micro(opened_at)) / 1e6), 3) AS open_s_p50
FROM
(
    SELECT run_id, mode, closed_by, members.rollout_id, expected_size, mean_reward, opened_at, closed_at
    FROM `groups`
    ORDER BY _offset
    LIMIT 1 BY run_id, group_id
)
GROUP BY run_id, mode, closed_by
ORDER BY run_id, mode, closed_by
