-- Which runs, environments and reasons of exclusions are there to choose from?
-- title: Choices
SELECT field, value
FROM
(
    SELECT 'run' AS field, run_id AS value FROM tasks GROUP BY run_id
    UNION ALL
    SELECT 'environment' AS field, environment AS value FROM tasks GROUP BY environment
    UNION ALL
    SELECT DISTINCT 'ending' AS field, concat('excluded: ', arrayJoin(exclusions.reason)) AS value FROM train_steps
)
ORDER BY field, value
LIMIT 200
