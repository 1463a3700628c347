-- What happened to one interaction, from the answer to the versions that learnt from it (interaction, run)?
-- title: Path
-- A signal counted where an outcome names it. Decisions and acknowledgements are those about the versions whose step
-- trained on it. `tidemill trace` tells the same from the log itself, and why a signal did not count.
WITH
    answers AS
    (
        SELECT run_id, served_at, replica_id, version_min, version_max, arm, consent, finish_reason, _topic, _partition, _offset
        FROM interactions
        WHERE interaction_id = {interaction:String} AND ({run:String} = '' OR run_id = {run:String})
    ),
    signals AS
    (
        SELECT event_id, kind, value, corrects, source, observed_at, _topic, _partition, _offset
        FROM feedback
        WHERE interaction_id = {interaction:String}
    ),
    ends AS
    (
        SELECT run_id, revision, reward, previous_reward, exclusion, closed_at, signals.event_id AS events,
            signals.contribution AS counted, _topic, _partition, _offset
        FROM outcomes
        WHERE interaction_id = {interaction:String} AND ({run:String} = '' OR run_id = {run:String})
        ORDER BY _offset
        LIMIT 1 BY run_id, revision
    ),
    uses AS
    (
        SELECT event, contribution, revision
        FROM ends
        ARRAY JOIN events AS event, counted AS contribution
        ORDER BY revision
        LIMIT 1 BY event
    ),
    batches AS
    (
        SELECT run_id, branch, batch_id, sequence, version, closed_at, _topic, _partition, _offset,
            arrayFilter(one -> one.1 = {interaction:String},
                arrayZip(members.interaction_id, members.reward, members.correction)) AS own
        FROM online_batches
        WHERE has(members.interaction_id, {interaction:String}) AND ({run:String} = '' OR run_id = {run:String})
        ORDER BY _offset
        LIMIT 1 BY run_id, branch, batch_id
    ),
    steps AS
    (
        SELECT
            run_id, step, version, parent_version, finished_at, _topic, _partition, _offset,
            hasAny(inputs.group_id, (SELECT groupArray(batch_id) FROM batches)) AS read,
            arrayFirst(one -> one.1 = {interaction:String} OR has((SELECT groupArray(batch_id) FROM batches), one.1),
                arrayZip(exclusions.group_id, exclusions.reason)).2 AS left_out
        FROM train_steps
        WHERE run_id IN (SELECT run_id FROM batches)
            AND hasAny(
                arrayConcat(inputs.group_id, exclusions.group_id),
                arrayPushBack((SELECT groupArray(batch_id) FROM batches), {interaction:String}))
        ORDER BY _offset
        LIMIT 1 BY run_id, step
    ),
    trained AS (SELECT run_id, version FROM steps WHERE read AND left_out = '')
SELECT stage, at, event, run_id, version, _topic, _partition, _offset
FROM
(
    SELECT 1 AS place, 'served' AS stage, served_at AS at,
        concat(
            'by ', replica_id, ', arm ', arm, if(consent, '', ', no consent'), ', ', finish_reason,
            if(row_number() OVER (PARTITION BY run_id ORDER BY _offset) > 1, ': the same record again', '')) AS event,
        run_id, toNullable(version_max) AS version, _topic, _partition, _offset
    FROM answers
    UNION ALL
    SELECT 2, 'feedback', s.observed_at,
        concat(
            toString(s.kind), if(s.value IS NULL, '', concat(' ', toString(s.value))), ' from ', s.source,
            if(s.corrects IS NULL, '', concat(', correcting ', assumeNotNull(s.corrects))),
            if(u.event = '', '', concat(': counted ', toString(u.contribution), ' in the reward',
                if(u.revision > 0, concat(' of revision ', toString(u.revision)), '')))),
        '', NULL, s._topic, s._partition, s._offset
    FROM signals AS s
    LEFT JOIN uses AS u ON u.event = s.event_id
    UNION ALL
    SELECT 2, 'refused', source_timestamp, concat(reason, ', found by ', toString(found_by)), '', NULL, _topic, _partition, _offset
    FROM dead_letters
    WHERE splitByChar('/', _key)[1] = {interaction:String}
    UNION ALL
    SELECT 3, 'outcome', closed_at,
        concat(
            if(exclusion = '', concat('reward ', toString(assumeNotNull(reward))), concat('excluded: ', exclusion)),
            if(revision = 0, '', concat(', revision ', toString(revision), ', before ', ifNull(toString(previous_reward), 'none')))),
        run_id, NULL, _topic, _partition, _offset
    FROM ends
    UNION ALL
    SELECT 4, 'batch', closed_at,
        concat(batch_id, arrayStringConcat(arrayMap(
            one -> concat(if(one.3, ', correction ', ', reward '), toString(one.2)), own))),
        run_id, version, _topic, _partition, _offset
    FROM batches
    UNION ALL
    SELECT 5, 'step', finished_at,
        if(read AND left_out = '', concat('step ', toString(step), ' trained on it, from version ', toString(parent_version)),
            concat('step ', toString(step), ' left it out: ', left_out)),
        run_id, if(read AND left_out = '', toNullable(version), NULL), _topic, _partition, _offset
    FROM steps
    UNION ALL
    SELECT 6, 'version', published_at, concat('published to branch ', branch), run_id, version, _topic, _partition, _offset
    FROM weights_manifests
    WHERE (run_id, version) IN trained
    UNION ALL
    SELECT 7, 'decision', at, concat(toString(verdict), ' by ', decided_by, ': ', reason), run_id, version, _topic, _partition, _offset
    FROM gate_decisions
    WHERE (run_id, assumeNotNull(version)) IN trained AND version IS NOT NULL
    UNION ALL
    SELECT 8, 'replica', at, concat(replica_id, ' ', toString(status), if(reason = '', '', concat(': ', reason))),
        run_id, version, _topic, _partition, _offset
    FROM weights_acks
    WHERE (run_id, version) IN trained
)
ORDER BY place, at, _offset
LIMIT 500
