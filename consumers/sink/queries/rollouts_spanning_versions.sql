-- How many rollouts were sampled under more than one weight version, and how many of them were trained?
SELECT
    run_id,
    mode,
    length(arrayDistinct(spans.version)) AS versions,
    count() AS rollouts,
    countIf(rollout_id IN
    (
        SELECT arrayJoin(members.rollout_id)
        FROM `groups`
        WHERE (group_id, _offset) IN (SELECT inputs.group_id, inputs.offset FROM train_steps ARRAY JOIN inputs)
    )) AS in_trained_groups,
    round(avg(sampled_tokens), 1) AS sampled_tokens,
    max(version_max - version_min) AS widest_span
FROM
(
    SELECT run_id, mode, rollout_id, spans.version, sampled_tokens, version_min, version_max
    FROM rollouts
    LIMIT 1 BY cityHash64(run_id, rollout_id)
)
GROUP BY run_id, mode, versions
ORDER BY run_id, mode, versions
