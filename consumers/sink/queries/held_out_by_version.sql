-- How often are held-out tasks solved under each weight version?
SELECT
    r.run_id AS run_id,
    r.version AS version,
    m.step AS step,
    r.finished AS finished,
    r.failed AS failed,
    r.success AS success
FROM
(
    SELECT
        run_id,
        version_max AS version,
        countIf(status = 'completed') AS finished,
        countIf(status = 'failed') AS failed,
        round(avg(toFloat64(success)), 4) AS success
    FROM rollouts
    WHERE mode = 'eval'
    GROUP BY run_id, version
) AS r
LEFT JOIN
(
    SELECT run_id, version, any(toNullable(step)) AS step
    FROM weights_manifests
    GROUP BY run_id, version
) AS m ON m.run_id = r.run_id AND m.version = r.version
ORDER BY run_id, version
