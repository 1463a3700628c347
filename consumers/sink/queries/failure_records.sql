-- Which records are under one line of the query `failures`, newest first (what, source, reason)?
-- title: Failed, refused or dead
SELECT *
FROM
(
    SELECT 'failed rollout' AS what, environment AS source, failure AS reason, run_id, rollout_id AS id, _timestamp AS at, _topic, _partition, _offset
    FROM rollouts
    WHERE status = 'failed'
    ORDER BY _offset
    LIMIT 1 BY run_id, rollout_id, failure
    UNION ALL
    SELECT 'refused version', replica_id, reason, run_id, toString(version), _timestamp, _topic, _partition, _offset
    FROM weights_acks
    WHERE status = 'refused'
    UNION ALL
    SELECT 'dead letter', toString(source_topic), reason, '', concat(toString(source_partition), ' ', toString(source_offset)), _timestamp,
        _topic, _partition, _offset
    FROM dead_letters
    ORDER BY _timestamp
    LIMIT 1 BY source_topic, source_partition, source_offset, reason
)
WHERE ({what:String} = '' OR what = {what:String})
    AND ({source:String} = '' OR source = {source:String})
    AND ({reason:String} = '' OR reason = {reason:String})
ORDER BY at DESC, _partition, _offset
LIMIT 1000
