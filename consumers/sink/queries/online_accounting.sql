-- How did every answer to users end: rewarded or excluded, in one batch or dropped, trained or excluded? Do the counts add up?
-- title: How interactions ended
WITH
    answers AS (SELECT * FROM interactions ORDER BY _offset LIMIT 1 BY run_id, interaction_id),
    ends AS (SELECT * FROM outcomes ORDER BY _offset LIMIT 1 BY run_id, interaction_id, revision),
    batches AS (SELECT * FROM online_batches ORDER BY _offset LIMIT 1 BY run_id, branch, batch_id),
    steps AS (SELECT * FROM train_steps ORDER BY _offset LIMIT 1 BY run_id, step),
    used AS
    (
        SELECT run_id, step, inputs.group_id AS batch_id
        FROM steps
        ARRAY JOIN inputs
        WHERE inputs.topic = 'online-batches'
    ),
    left_out AS
    (
        SELECT run_id, step, exclusions.group_id AS interaction_id
        FROM steps
        ARRAY JOIN exclusions
        WHERE exclusions.topic = 'interactions'
    ),
    refused AS
    (
        SELECT run_id, exclusions.group_id AS batch_id
        FROM steps
        ARRAY JOIN exclusions
        WHERE exclusions.topic = 'online-batches'
    ),
    members AS
    (
        SELECT run_id, branch, batch_id, members.interaction_id AS interaction_id, members.correction AS correction
        FROM batches
        ARRAY JOIN members
    ),
    read AS
    (
        SELECT m.run_id AS run_id, m.branch AS branch, if(l.interaction_id != '', 'left_out', 'trained') AS ending
        FROM members AS m
        INNER JOIN used AS u ON u.run_id = m.run_id AND u.batch_id = m.batch_id
        LEFT JOIN left_out AS l ON l.run_id = m.run_id AND l.step = u.step AND l.interaction_id = m.interaction_id
    ),
    counted AS
    (
        SELECT run_id, branch, 'served' AS what, toInt64(count()) AS n
        FROM answers
        GROUP BY run_id, branch
        UNION ALL
        SELECT
            run_id,
            branch,
            multiIf(revision > 0, 'corrections', reward IS NULL, 'excluded', 'rewards') AS what,
            toInt64(count()) AS n
        FROM ends
        GROUP BY run_id, branch, what
        UNION ALL
        SELECT run_id, branch, 'carried' AS what, toInt64(count()) AS n
        FROM ends
        WHERE reward IS NOT NULL OR previous_reward IS NOT NULL
        GROUP BY run_id, branch
        UNION ALL
        SELECT run_id, branch, 'batched' AS what, toInt64(count()) AS n
        FROM members
        GROUP BY run_id, branch
        UNION ALL
        SELECT run_id, branch, 'batched_twice' AS what, toInt64(count() - uniqExact(interaction_id)) AS n
        FROM members
        WHERE NOT correction
        GROUP BY run_id, branch
        UNION ALL
        SELECT run_id, branch, 'batched_and_erased' AS what, toInt64(count()) AS n
        FROM members
        WHERE (run_id, interaction_id) NOT IN (SELECT run_id, interaction_id FROM ends)
        GROUP BY run_id, branch
        UNION ALL
        SELECT
            run_id,
            branch,
            'dropped' AS what,
            sum(arraySum(mapValues(mapFilter((reason, times) -> reason != 'erased', dropped)))) AS n
        FROM batches
        GROUP BY run_id, branch
        UNION ALL
        SELECT run_id, branch, ending AS what, toInt64(count()) AS n
        FROM read
        GROUP BY run_id, branch, what
        UNION ALL
        SELECT m.run_id AS run_id, m.branch AS branch, 'left_out' AS what, toInt64(count()) AS n
        FROM members AS m
        INNER JOIN refused AS r ON r.run_id = m.run_id AND r.batch_id = m.batch_id
        GROUP BY run_id, branch
    )
SELECT
    run_id,
    branch,
    sumIf(n, what = 'served') AS served,
    sumIf(n, what = 'rewards') AS rewards,
    sumIf(n, what = 'excluded') AS excluded,
    served - rewards - excluded AS open,
    sumIf(n, what = 'corrections') AS corrections,
    sumIf(n, what = 'carried') AS carried_a_reward,
    sumIf(n, what = 'batched') AS batched,
    sumIf(n, what = 'batched_twice') AS batched_twice,
    sumIf(n, what = 'batched_and_erased') AS batched_and_erased,
    sumIf(n, what = 'dropped') AS dropped,
    carried_a_reward - (batched - batched_and_erased) - dropped AS waiting,
    sumIf(n, what = 'trained') AS trained,
    sumIf(n, what = 'left_out') AS left_out
FROM counted
GROUP BY run_id, branch
ORDER BY run_id, branch
