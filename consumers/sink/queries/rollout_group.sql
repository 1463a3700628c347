-- How did the rollouts of one rollout's group do, the best and the worst first?
-- title: Its group, best and worst first
-- `run` may be empty.
SELECT
    if(r.rollout_id = {rollout_id:String}, 'this one', '') AS here,
    r.rollout_id AS rollout_id,
    round(r.reward, 6) AS reward,
    round(m.advantage, 6) AS advantage,
    r.success AS success,
    r.status AS status,
    r.turns AS turns,
    r.sampled_tokens AS sampled_tokens,
    if(r.version_min = r.version_max, toString(r.version_min), concat(toString(r.version_min), '-', toString(r.version_max)))
        AS sampled_by,
    r.run_id AS run_id
FROM
(
    SELECT
        *,
        row_number() OVER (ORDER BY reward DESC NULLS LAST, rollout_id) AS from_best,
        row_number() OVER (ORDER BY reward ASC NULLS LAST, rollout_id DESC) AS from_worst
    FROM
    (
        SELECT run_id, rollout_id, group_id, status, reward, success, turns, sampled_tokens, version_min, version_max
        FROM rollouts
        WHERE group_id IN (SELECT group_id FROM rollouts WHERE rollout_id = {rollout_id:String})
            AND ({run:String} = '' OR run_id = {run:String})
        ORDER BY _offset
        LIMIT 1 BY run_id, rollout_id
    )
) AS r
LEFT JOIN
(
    SELECT members.rollout_id AS rollout_id, any(members.advantage) AS advantage
    FROM `groups`
    ARRAY JOIN members
    WHERE group_id IN (SELECT group_id FROM rollouts WHERE rollout_id = {rollout_id:String})
    GROUP BY rollout_id
) AS m ON m.rollout_id = r.rollout_id
ORDER BY least(r.from_best, r.from_worst), r.from_best
LIMIT 1000
