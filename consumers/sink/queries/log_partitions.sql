-- Which offsets of each partition do the tables hold, and up to where have they read it (topic)?
-- title: Partitions
-- records: log_records
WITH
    held AS
    (
        SELECT _topic, _partition, _offset, _timestamp FROM documents
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM tasks
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM rollouts
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM ticks
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM rollouts_progress
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM turns
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM `groups`
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM weights_deltas
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM weights_manifests
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM skip_deltas
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM weights_acks
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM train_steps
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM train_mismatch
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM step_plans
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM staleness
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM gate_decisions
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM interactions
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM feedback
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM outcomes
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM online_batches
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM user_requests
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM dead_letters
    ),
    counted AS
    (
        SELECT
            _topic,
            _partition,
            count() AS n,
            min(_offset) AS first,
            max(_offset) AS last,
            max(_timestamp) AS latest
        FROM held
        WHERE {topic:String} = '' OR _topic = {topic:String}
        GROUP BY _topic, _partition
    ),
    marks AS
    (
        SELECT _topic, _partition, max(next_offset) AS next
        FROM sink_watermarks
        WHERE {topic:String} = '' OR _topic = {topic:String}
        GROUP BY _topic, _partition
    )
SELECT
    _topic AS topic,
    _partition AS partition,
    n AS rows,
    if(n = 0, NULL, first) AS first_offset,
    if(n = 0, NULL, last) AS last_offset,
    next AS read_up_to,
    greatest(if(n = 0, 0, next - first - toInt64(n)), 0) AS without_row,
    if(n = 0, NULL, latest) AS newest_record
FROM counted
FULL OUTER JOIN marks USING (_topic, _partition)
ORDER BY topic, partition
