-- Which numbers did a step record, and what were those of the step before it?
-- title: Metrics
WITH
    toInt64OrNull({step:String}) AS asked,
    steps AS
    (
        SELECT run_id, step, metrics
        FROM train_steps
        WHERE (step = asked OR step = asked - 1) AND ({run:String} = '' OR run_id = {run:String})
        ORDER BY _offset
        LIMIT 1 BY run_id, step
    )
SELECT run_id, metric, anyIf(toNullable(value), step = asked) AS in_step, anyIf(toNullable(value), step = asked - 1) AS in_step_before
FROM
(
    SELECT run_id, step, pair.1 AS metric, pair.2 AS value
    FROM steps
    ARRAY JOIN CAST(metrics, 'Array(Tuple(String, Float64))') AS pair
)
GROUP BY run_id, metric
HAVING in_step IS NOT NULL
ORDER BY run_id, metric
