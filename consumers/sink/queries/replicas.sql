-- What does each replica serve, has it proved it, and what did its updates cost?
-- title: Replicas
SELECT
    replica_id,
    argMax(region, _offset) AS region,
    argMax(pid, _offset) AS pid,
    countDistinct(incarnation) AS processes,
    argMax(serving_version, _offset) AS serving,
    argMax(status, _offset) AS last_status,
    argMaxIf(fingerprint = expected_fingerprint, _offset, status != 'refused') AS fingerprints_equal,
    countIf(status = 'proved') AS proved,
    countIf(status = 'anchored') AS anchored,
    countIf(status = 'refused') AS refused,
    round(quantileIf(0.5)(pause_ms, status = 'proved'), 2) AS pause_ms_p50,
    round(quantileIf(0.95)(pause_ms, status = 'proved'), 2) AS pause_ms_p95,
    max(at) AS last_seen
FROM weights_acks
WHERE {run:String} = '' OR run_id = {run:String}
GROUP BY replica_id
ORDER BY replica_id
