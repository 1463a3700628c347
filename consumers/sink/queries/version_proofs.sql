-- Which replicas proved, refused or loaded this version, when, and what did it cost?
-- title: Who holds it
SELECT
    run_id,
    branch,
    at,
    replica_id,
    status,
    fingerprint = expected_fingerprint AS fingerprints_equal,
    reason,
    round(fetch_ms, 2) AS fetch_ms,
    round(decode_ms, 2) AS decode_ms,
    round(pause_ms, 2) AS pause_ms,
    round(proof_ms, 2) AS proof_ms,
    round(step_to_served_ms / 1000, 3) AS step_to_served_s,
    _topic AS topic,
    _partition AS partition,
    _offset AS offset
FROM weights_acks
WHERE version = toInt64OrNull({version:String})
    AND ({run:String} = '' OR run_id = {run:String})
    AND ({branch:String} = '' OR branch = {branch:String})
ORDER BY run_id, at, replica_id
LIMIT 1000
