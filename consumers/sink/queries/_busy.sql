    -- Spans that last to the end of the second in which they begin overlap there, and those that begin at one time do:
    -- one span stands for them.
    spans AS
    (
        SELECT any(s.run_id) AS run_id, min(s.began) AS began, max(s.ended) AS ended
        FROM sampling AS s
        GROUP BY cityHash64(s.run_id, if(s.ended >= 1000000 * (intDiv(s.began, 1000000) + 1), intDiv(s.began, 1000000), s.began))
    ),
    marked AS
    (
        SELECT
            run_id,
            began,
            ended,
            began > max(ended) OVER (PARTITION BY run_id ORDER BY began, ended ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS opens
        FROM spans
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
