-- How long after a user's signal did a replica serve a version that learnt from it, or a later one?
-- title: From feedback to served weights
-- plot: line
-- x: version
-- y: seconds_p50, seconds_p95
-- unit: seconds
WITH
    steps AS (SELECT * FROM train_steps ORDER BY _offset LIMIT 1 BY run_id, step),
    batches AS (SELECT * FROM online_batches ORDER BY _offset LIMIT 1 BY run_id, branch, batch_id),
    trained AS
    (
        SELECT run_id, version, inputs.group_id AS batch_id
        FROM steps
        ARRAY JOIN inputs
        WHERE inputs.topic = 'online-batches'
    ),
    left_out AS
    (
        SELECT run_id, version, exclusions.group_id AS interaction_id
        FROM steps
        ARRAY JOIN exclusions
        WHERE exclusions.topic = 'interactions'
    ),
    signals AS
    (
        SELECT run_id, branch, batch_id, members.interaction_id AS interaction_id, members.feedback_at AS feedback_at
        FROM batches
        ARRAY JOIN members
        WHERE members.feedback_at IS NOT NULL
    ),
    learnt AS
    (
        SELECT s.run_id AS run_id, s.branch AS branch, t.version AS version, assumeNotNull(s.feedback_at) AS feedback_at
        FROM signals AS s
        INNER JOIN trained AS t ON t.run_id = s.run_id AND t.batch_id = s.batch_id
        WHERE (s.run_id, t.version, s.interaction_id) NOT IN (SELECT run_id, version, interaction_id FROM left_out)
    ),
    times AS
    (
        SELECT run_id, branch, serving_version AS version, toNullable(min(at)) AS at
        FROM weights_acks
        WHERE status != 'refused'
        GROUP BY run_id, branch, version
        UNION ALL
        SELECT DISTINCT run_id, branch, version, NULL AS at
        FROM learnt
    ),
    served AS
    (
        SELECT
            run_id,
            branch,
            version,
            min(at) OVER (PARTITION BY run_id, branch ORDER BY version DESC RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS at
        FROM times
    ),
    first AS (SELECT run_id, branch, version, min(at) AS at FROM served GROUP BY run_id, branch, version)
SELECT
    l.run_id AS run_id,
    l.branch AS branch,
    l.version AS version,
    count() AS signals,
    any(f.at) AS served_at,
    round(quantile(0.5)((toUnixTimestamp64Micro(f.at) - toUnixTimestamp64Micro(l.feedback_at)) / 1e6), 3) AS seconds_p50,
    round(quantile(0.95)((toUnixTimestamp64Micro(f.at) - toUnixTimestamp64Micro(l.feedback_at)) / 1e6), 3) AS seconds_p95
FROM learnt AS l
LEFT JOIN first AS f ON f.run_id = l.run_id AND f.branch = l.branch AND f.version = l.version
GROUP BY run_id, branch, version
ORDER BY run_id, branch, version
