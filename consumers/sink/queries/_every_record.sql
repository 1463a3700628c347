    held AS
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
    ),
