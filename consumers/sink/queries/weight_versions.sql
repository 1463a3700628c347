-- How large was each weight version, and how fast did the replicas serve it?
-- title: Weight versions
SELECT
    m.run_id AS run_id,
    m.version AS version,
    m.step AS step,
    m.learning_rate AS learning_rate,
    m.n_changed AS changed,
    round(m.n_changed / m.n_elements, 5) AS density,
    m.delta_bytes AS delta_bytes,
    round(m.delta_bytes / nullIf(m.n_changed, 0), 3) AS bytes_per_change,
    m.anchored AS anchor,
    a.replicas AS replicas,
    a.pause_ms_p50 AS pause_ms_p50,
    a.pause_ms_p95 AS pause_ms_p95,
    a.step_to_served_s_p50 AS step_to_served_s_p50,
    a.step_to_served_s_p95 AS step_to_served_s_p95
FROM
(
    SELECT *, anchor_uri IS NOT NULL AS anchored
    FROM weights_manifests
    WHERE {run:String} = '' OR run_id = {run:String}
    ORDER BY _offset
    LIMIT 1 BY run_id, branch, version
) AS m
LEFT JOIN
(
    SELECT
        run_id,
        branch,
        version,
        countDistinct(replica_id) AS replicas,
        toNullable(round(quantile(0.5)(pause_ms), 2)) AS pause_ms_p50,
        toNullable(round(quantile(0.95)(pause_ms), 2)) AS pause_ms_p95,
        toNullable(round(quantile(0.5)(step_to_served_ms) / 1000, 3)) AS step_to_served_s_p50,
        toNullable(round(quantile(0.95)(step_to_served_ms) / 1000, 3)) AS step_to_served_s_p95
    FROM weights_acks
    WHERE status != 'refused'
    GROUP BY run_id, branch, version
) AS a ON a.run_id = m.run_id AND a.branch = m.branch AND a.version = m.version
ORDER BY run_id, m.branch, version
