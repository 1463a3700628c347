-- Which records of a topic do the tables hold, newest first (topic, partition, before: an offset)?
-- title: Records
SELECT _topic, _partition, _offset, _timestamp, if(isValidUTF8(_key), _key, concat('0x', hex(_key))) AS key
FROM
(
        SELECT _topic, _partition, _offset, _timestamp, _key FROM documents
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM tasks
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM rollouts
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM ticks
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM rollouts_progress
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM turns
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM `groups`
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM weights_deltas
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM weights_manifests
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM skip_deltas
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM weights_acks
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM train_steps
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM train_mismatch
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM step_plans
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM staleness
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM gate_decisions
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM interactions
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM feedback
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM outcomes
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM online_batches
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM user_requests
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp, _key FROM dead_letters
)
WHERE _topic = {topic:String}
    AND ({partition:String} = '' OR _partition = toInt32OrNull({partition:String}))
    AND ({before:String} = '' OR _offset < toInt64OrNull({before:String}))
ORDER BY _timestamp DESC, _offset DESC
LIMIT 500
