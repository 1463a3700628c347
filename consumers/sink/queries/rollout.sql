-- How did one rollout go, and how did it end?
-- title: Rollout
-- `run`, `partition` and `offset` may be empty; with a place of it in the log, it is found at once.
WITH
    one AS
    (
        SELECT * EXCEPT (token_ids, loss_mask, logprobs)
        FROM rollouts
        WHERE rollout_id = {rollout_id:String}
            AND ({run:String} = '' OR run_id = {run:String})
            AND ({partition:String} = '' OR _partition = toInt32OrZero({partition:String}))
            AND ({offset:String} = '' OR _offset = toInt64OrZero({offset:String}))
        ORDER BY _timestamp, _offset
        LIMIT 1
    ),
    member AS
    (
        SELECT
            group_id,
            toInt64(_partition) AS part,
            _offset AS place,
            concat(_topic, ' ', toString(_partition), ' ', toString(_offset)) AS position,
            toString(closed_by) AS closed_by,
            indexOf(members.rollout_id, {rollout_id:String}) AS number,
            members.advantage[number] AS advantage
        FROM `groups`
        WHERE group_id IN (SELECT group_id FROM one) AND number > 0
    ),
    steps AS (SELECT * FROM train_steps ORDER BY _offset LIMIT 1 BY run_id, step),
    read AS
    (
        SELECT inputs.group_id AS group_id, step, toNullable(version) AS version, _topic, _partition, _offset,
            inputs.partition AS part, inputs.offset AS place, 'trained' AS ending
        FROM steps
        ARRAY JOIN inputs
        UNION ALL
        SELECT exclusions.group_id, step, NULL, _topic, _partition, _offset,
            exclusions.partition, exclusions.offset, concat('excluded: ', exclusions.reason)
        FROM steps
        ARRAY JOIN exclusions
        WHERE exclusions.reason != 'eval'
    ),
    grouped AS
    (
        SELECT
            count() AS groups,
            any(m.position) AS group_position,
            any(m.closed_by) AS closed_by,
            any(m.advantage) AS advantage,
            countIf(r.ending != '') AS ended,
            anyIf(r.ending, r.ending != '') AS ending,
            anyIf(toNullable(r.step), r.ending != '') AS step,
            anyIf(r.version, r.ending != '') AS version,
            anyIf(concat(r._topic, ' ', toString(r._partition), ' ', toString(r._offset)), r.ending != '') AS step_position
        FROM member AS m
        LEFT JOIN read AS r ON r.group_id = m.group_id AND r.part = m.part AND r.place = m.place
    )
SELECT
    one.run_id AS run_id,
    one.rollout_id AS rollout_id,
    one.group_id AS group_id,
    one.task_id AS task_id,
    one.environment AS environment,
    toString(one.mode) AS mode,
    toString(one.status) AS status,
    one.failure AS failure,
    multiIf(
        g.ended > 1, 'more than one ending',
        g.ended = 1 AND g.ending != 'trained', g.ending,
        one.status = 'failed', 'failed',
        g.ended = 1, g.ending,
        g.groups > 0, if(one.mode = 'eval', 'evaluated', 'open: in a group'),
        'open: in no group') AS ending,
    g.step AS step,
    g.version AS version,
    one.reward AS reward,
    one.success AS success,
    g.advantage AS advantage,
    one.`rewards.name` AS component_names,
    one.`rewards.value` AS component_values,
    one.`rewards.weight` AS component_weights,
    one.reward_version AS reward_version,
    one.turns AS turns,
    one.prompt_tokens AS prompt_tokens,
    one.sampled_tokens AS sampled_tokens,
    one.version_min AS version_min,
    one.version_max AS version_max,
    toString(one.replica_id) AS replica_id,
    one.region AS region,
    one.worker_id AS worker_id,
    one.started_at AS started_at,
    one.finished_at AS finished_at,
    one.metrics AS metrics,
    one.claim_uri AS claim_uri,
    one.claim_n_bytes AS claim_bytes,
    one._topic AS topic,
    one._partition AS partition,
    one._offset AS offset,
    g.group_position AS group_position,
    g.closed_by AS closed_by,
    g.step_position AS step_position
FROM one
CROSS JOIN grouped AS g
