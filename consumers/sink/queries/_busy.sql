    marked AS
    (
        SELECT
            run_id,
            began,
            ended,
            began > max(ended) OVER (PARTITION BY run_id ORDER BY began, ended ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS opens
        FROM sampling
    ),
    numbered AS
    (
        SELECT
            run_id,
            began,
            ended,
            sum(opens) OVER (PARTITION BY run_id ORDER BY began, ended ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS island
        FROM marked
    ),
    busy AS
    (
        SELECT run_id, island, min(began) AS began, max(ended) AS ended
        FROM numbered
        GROUP BY run_id, island
    ),
