-- Which interactions were there, newest first, and how did each end (run, arm, version, user, ending, before: a time)?
-- title: Interactions
WITH
    met AS
    (
        SELECT
            run_id, interaction_id, user_id, arm, version_min, version_max, sampled_tokens, latency_ms, served_at,
            _topic, _partition, _offset
        FROM interactions
        WHERE ({run:String} = '' OR run_id = {run:String})
            AND ({run_id:String} = '' OR run_id = {run_id:String})
            AND ({arm:String} = '' OR arm = {arm:String})
            AND ({version:String} = '' OR version_max = toInt64OrNull({version:String}))
            AND ({user:String} = '' OR user_id = {user:String})
            AND ({before:String} = '' OR served_at < parseDateTime64BestEffortOrNull({before:String}, 6, 'UTC'))
            AND ({ending:String} = '' OR (run_id, interaction_id) IN
            (
                SELECT run_id, interaction_id
                FROM outcomes
                WHERE if(exclusion = '', 'reward', concat('excluded: ', exclusion)) = {ending:String} AND revision = 0
            ) OR ({ending:String} = 'open' AND (run_id, interaction_id) NOT IN (SELECT run_id, interaction_id FROM outcomes)))
        ORDER BY served_at DESC, _partition, _offset
        LIMIT 300
    ),
    shown AS (SELECT * FROM met ORDER BY served_at DESC, _offset LIMIT 1 BY run_id, interaction_id LIMIT 200),
    ends AS
    (
        SELECT run_id, interaction_id, reward, exclusion, revision, feedback_at
        FROM outcomes
        WHERE (run_id, interaction_id) IN (SELECT run_id, interaction_id FROM shown)
        ORDER BY revision DESC, _offset
        LIMIT 1 BY run_id, interaction_id
    )
SELECT
    s.run_id AS run_id,
    s.interaction_id AS interaction_id,
    s.served_at AS served_at,
    s.user_id AS user,
    s.arm AS arm,
    if(s.version_min = s.version_max, toString(s.version_max), concat(toString(s.version_min), '-', toString(s.version_max)))
        AS sampled_by,
    multiIf(e.interaction_id = '', 'open', e.exclusion != '', concat('excluded: ', e.exclusion), 'reward') AS ending,
    e.reward AS reward,
    if(e.interaction_id = '', NULL, e.revision) AS revision,
    e.feedback_at AS feedback_at,
    s.sampled_tokens AS sampled_tokens,
    round(s.latency_ms, 1) AS latency_ms,
    s._topic AS _topic,
    s._partition AS _partition,
    s._offset AS _offset
FROM shown AS s
LEFT JOIN ends AS e ON e.run_id = s.run_id AND e.interaction_id = s.interaction_id
ORDER BY served_at DESC, interaction_id
