-- Are slow tasks trained as often as quick ones? Compares dispatched and trained rollouts by number of turns.
WITH
    steps AS (SELECT * FROM train_steps ORDER BY _offset LIMIT 1 BY run_id, step),
    used AS
    (
        SELECT inputs.group_id AS group_id, inputs.partition AS part, inputs.offset AS place
        FROM steps
        ARRAY JOIN inputs
    ),
    trained AS
    (
        SELECT arrayJoin(members.rollout_id) AS rollout_id
        FROM `groups`
        WHERE (group_id, toInt64(_partition), _offset) IN (SELECT group_id, part, place FROM used)
    ),
    sampled AS
    (
        SELECT run_id, rollout_id, max(turn) + 1 AS turns, sum(n_tokens) AS tokens
        FROM (SELECT * FROM turns ORDER BY _offset LIMIT 1 BY run_id, rollout_id, turn)
        GROUP BY run_id, rollout_id
    ),
    made AS
    (
        SELECT
            run_id,
            rollout_id,
            any(status) AS status,
            any(failure) AS failure,
            any(turns) AS turns,
            any(sampled_tokens) AS tokens
        FROM rollouts
        WHERE mode = 'train'
        GROUP BY run_id, rollout_id
    ),
    taken AS
    (
        SELECT run_id, concat(group_id, '/', toString(arrayJoin(indexes))) AS rollout_id
        FROM rollouts_progress
        WHERE task_id NOT IN (SELECT task_id FROM tasks WHERE mode = 'eval')
        UNION DISTINCT
        SELECT run_id, rollout_id
        FROM made
    ),
    lengths AS
    (
        SELECT
            t.run_id AS run_id,
            t.rollout_id AS rollout_id,
            m.status AS status,
            m.failure AS failure,
            greatest(toInt64(m.turns), toInt64(s.turns)) AS turns,
            greatest(toInt64(m.tokens), toInt64(s.tokens)) AS tokens
        FROM taken AS t
        LEFT JOIN made AS m ON m.run_id = t.run_id AND m.rollout_id = t.rollout_id
        LEFT JOIN sampled AS s ON s.run_id = t.run_id AND s.rollout_id = t.rollout_id
    )
SELECT
    run_id,
    turns,
    count() AS dispatched,
    countIf(status = 'completed') AS finished,
    countIf(status = 'failed') AS failed,
    countIf(status = 'failed' AND match(failure, '(?i)expired|timeout|deadline')) AS out_of_time,
    countIf(status = 'completed' AND rollout_id IN (SELECT rollout_id FROM trained)) AS trained,
    round(avg(tokens), 1) AS sampled_tokens,
    round(dispatched / sum(dispatched) OVER (PARTITION BY run_id), 4) AS share_dispatched,
    round(trained / nullIf(sum(trained) OVER (PARTITION BY run_id), 0), 4) AS share_trained,
    round(share_trained - share_dispatched, 4) AS difference
FROM lengths
GROUP BY run_id, turns
ORDER BY run_id, turns
