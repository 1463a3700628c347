-- How do the interactions that were trained on differ from those that were served, batch by batch?
SELECT
    run_id,
    branch,
    sequence,
    version,
    replaceRegexpOne(measured.1, '^(served|trained)/', '') AS measure,
    round(anyIf(toNullable(measured.2), startsWith(measured.1, 'served/')), 4) AS served,
    round(anyIf(toNullable(measured.2), startsWith(measured.1, 'trained/')), 4) AS trained,
    round(trained - served, 4) AS difference
FROM (SELECT * FROM online_batches ORDER BY _offset LIMIT 1 BY run_id, branch, batch_id)
ARRAY JOIN CAST(selection, 'Array(Tuple(String, Float64))') AS measured
GROUP BY run_id, branch, sequence, version, measure
ORDER BY run_id, branch, sequence, measure
