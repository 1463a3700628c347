-- What went wrong: failed rollouts, refused weight versions and dead letters, each with its reason?
-- title: Failures
-- records: failure_records
SELECT *
FROM
(
    SELECT 'failed rollout' AS what, environment AS source, failure AS reason, uniqExact(run_id, rollout_id) AS times, max(_timestamp) AS latest
    FROM rollouts
    WHERE status = 'failed'
    GROUP BY environment, failure
    UNION ALL
    SELECT 'refused version' AS what, replica_id AS source, reason, count() AS times, max(_timestamp) AS latest
    FROM weights_acks
    WHERE status = 'refused'
    GROUP BY replica_id, reason
    UNION ALL
    SELECT
        'dead letter' AS what,
        toString(source_topic) AS source,
        reason,
        uniqExact(source_partition, source_offset) AS times,
        max(_timestamp) AS latest
    FROM dead_letters
    GROUP BY source_topic, reason
)
ORDER BY what, times DESC, source, reason
