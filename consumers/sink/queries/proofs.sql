-- Which replica proved, refused or loaded which version, and when?
-- title: Proofs
SELECT
    run_id,
    branch,
    version,
    replica_id,
    status,
    at,
    fingerprint = expected_fingerprint AS fingerprints_equal,
    round(pause_ms, 2) AS pause_ms,
    reason,
    _topic AS topic,
    _partition AS partition,
    _offset AS offset
FROM weights_acks
WHERE {run:String} = '' OR run_id = {run:String}
ORDER BY run_id, version DESC, at DESC, replica_id
LIMIT 500 BY run_id
