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
