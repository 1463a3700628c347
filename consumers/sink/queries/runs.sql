-- Which runs are in the tables, and how far has each come?
-- title: Runs
SELECT
    run_id,
    min(first) AS began,
    max(last) AS last_record,
    max(version) AS version,
    max(step) AS step
FROM
(
    SELECT run_id, min(_timestamp) AS first, max(_timestamp) AS last, max(version) AS version, 0 AS step
    FROM weights_manifests
    GROUP BY run_id
    UNION ALL
    SELECT run_id, min(_timestamp), max(_timestamp), 0, max(step)
    FROM train_steps
    GROUP BY run_id
    UNION ALL
    SELECT run_id, min(_timestamp), max(_timestamp), 0, 0
    FROM tasks
    GROUP BY run_id
)
GROUP BY run_id
ORDER BY last_record DESC, run_id
