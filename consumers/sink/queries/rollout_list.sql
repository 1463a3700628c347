-- Which rollouts are there, newest first, and how did each end?
-- title: Rollouts
-- Every parameter may be empty. `ending` is one of the query `accounting`, or the part before its colon; `text` stands in
-- the task, in the reason of a failure, or is the id; `tokens` is a JSON list of lists of token ids, one of which stands
-- in the rollout: looked for in the newest 2,000 that meet the other conditions; `before` is the `place` of a rollout.
WITH
    splitByChar(' ', {before:String}) AS reached,
    -- A place in the log as one number: sets of a million numbers are quick, sets of pairs are not.
    members AS
    (
        SELECT
            group_id,
            toInt64(_partition) AS part,
            _offset AS place,
            arrayMap((p, o) -> o * 65536 + p, members.partition, members.offset) AS places
        FROM `groups`
    ),
    steps AS (SELECT * FROM train_steps ORDER BY _offset LIMIT 1 BY run_id, step),
    read AS
    (
        SELECT inputs.group_id AS group_id, step, toNullable(version) AS version, inputs.partition AS part, inputs.offset AS place, 'trained' AS ending
        FROM steps
        ARRAY JOIN inputs
        UNION ALL
        SELECT exclusions.group_id, step, NULL, exclusions.partition, exclusions.offset, concat('excluded: ', exclusions.reason)
        FROM steps
        ARRAY JOIN exclusions
    ),
    ended AS
    (
        SELECT m.places AS places, if(r.ending = '', 'open: in a group', r.ending) AS ending
        FROM members AS m
        LEFT JOIN read AS r ON r.group_id = m.group_id AND r.part = m.part AND r.place = m.place
    ),
    met AS
    (
        SELECT *
        FROM rollouts
        WHERE ({run:String} = '' OR run_id = {run:String})
            AND ({environment:String} = '' OR environment = {environment:String})
            AND ({group:String} = '' OR group_id = {group:String})
            AND ({version:String} = '' OR toInt64OrZero({version:String}) BETWEEN version_min AND version_max)
            AND ({reward_min:String} = '' OR reward >= toFloat64OrZero({reward_min:String}))
            AND ({reward_max:String} = '' OR reward <= toFloat64OrZero({reward_max:String}))
            AND ({before:String} = '' OR (toUnixTimestamp64Milli(_timestamp), toInt64(_partition), _offset)
                < (toInt64OrZero(reached[1]), toInt64OrZero(reached[2]), toInt64OrZero(reached[3])))
            AND ({step:String} = '' OR _offset * 65536 + _partition IN
            (
                SELECT arrayJoin(places)
                FROM members
                WHERE (group_id, part, place) IN
                    (SELECT group_id, part, place FROM read WHERE step = toInt64OrZero({step:String}) AND ending = 'trained')
            ))
            -- A failed rollout is failed or excluded; a late one is not trained with its group: the rows below are exact.
            AND ({ending:String} != 'trained' OR group_id IN (SELECT inputs.group_id FROM steps ARRAY JOIN inputs))
            AND ({ending:String} != 'failed' OR status = 'failed' AND _offset * 65536 + _partition NOT IN
                (SELECT arrayJoin(places) FROM ended WHERE startsWith(ending, 'excluded')))
            AND ({ending:String} NOT IN ('trained', 'open', 'open: in a group', 'open: in no group') OR status != 'failed')
            AND ({ending:String} != 'open: in no group' OR _offset * 65536 + _partition NOT IN
                (SELECT arrayJoin(places) FROM members))
            AND ({ending:String} != 'open' OR _offset * 65536 + _partition NOT IN
                (SELECT arrayJoin(places) FROM ended WHERE ending != 'open: in a group'))
            AND ({ending:String} != 'more than one ending' OR _offset * 65536 + _partition IN
            (
                SELECT arrayJoin(places) AS one
                FROM ended
                WHERE ending != 'open: in a group'
                GROUP BY one
                HAVING count() > 1
            ))
            AND ({ending:String} IN ('', 'trained', 'failed', 'open', 'open: in no group', 'more than one ending')
                OR _offset * 65536 + _partition IN
            (
                SELECT arrayJoin(places)
                FROM ended
                WHERE ending = {ending:String} OR startsWith(ending, concat({ending:String}, ':'))
            ))
    ),
    in_words AS
    (
        SELECT _topic, _partition, _offset, _timestamp
        FROM met
        WHERE {text:String} = '' OR rollout_id = {text:String} OR positionCaseInsensitive(failure, {text:String}) > 0
            OR task_id IN (SELECT task_id FROM tasks WHERE positionCaseInsensitive(payload, {text:String}) > 0)
        ORDER BY _timestamp DESC, _partition DESC, _offset DESC
        LIMIT 50
    ),
    in_tokens AS
    (
        SELECT _topic, _partition, _offset, _timestamp
        FROM met
        WHERE {tokens:String} NOT IN ('', '[]')
            AND _offset * 65536 + _partition IN
                (SELECT _offset * 65536 + _partition FROM met ORDER BY _timestamp DESC LIMIT 2000)
            AND arrayExists(ids -> hasSubstr(token_ids, ids), JSONExtract({tokens:String}, 'Array(Array(UInt32))'))
        ORDER BY _timestamp DESC, _partition DESC, _offset DESC
        LIMIT 50
    ),
    shown AS
    (
        SELECT *, _offset * 65536 + _partition AS here
        FROM rollouts
        WHERE (_topic, _partition, _offset) IN
        (
            SELECT _topic, _partition, _offset FROM in_words
            UNION ALL
            SELECT _topic, _partition, _offset FROM in_tokens
        )
    )
SELECT
    s.rollout_id AS rollout_id,
    any(s.environment) AS environment,
    any(s.mode) AS mode,
    multiIf(
        countIf(has(m.places, s.here) AND r.ending != '') > 1, 'more than one ending',
        anyIf(r.ending, has(m.places, s.here) AND r.ending != '') NOT IN ('', 'trained'), anyIf(r.ending, has(m.places, s.here) AND r.ending != ''),
        any(s.status) = 'failed', 'failed',
        anyIf(r.ending, has(m.places, s.here) AND r.ending != '') = 'trained', 'trained',
        countIf(has(m.places, s.here)) > 0, 'open: in a group',
        'open: in no group') AS ending,
    anyIf(toNullable(r.step), has(m.places, s.here) AND r.ending = 'trained') AS step,
    anyIf(r.version, has(m.places, s.here) AND r.ending = 'trained') AS version,
    round(any(s.reward), 6) AS reward,
    any(s.success) AS success,
    any(if(s.version_min = s.version_max, toString(s.version_min), concat(toString(s.version_min), '-', toString(s.version_max))))
        AS sampled_by,
    any(s.turns) AS turns,
    any(s.sampled_tokens) AS sampled_tokens,
    any(s.finished_at) AS finished_at,
    s.run_id AS run_id,
    s._topic AS topic,
    s._partition AS partition,
    min(s._offset) AS offset,
    concat(toString(toUnixTimestamp64Milli(min(s._timestamp))), ' ', toString(s._partition), ' ', toString(min(s._offset))) AS place
FROM shown AS s
LEFT JOIN members AS m ON m.group_id = s.group_id
LEFT JOIN read AS r ON r.group_id = m.group_id AND r.part = m.part AND r.place = m.place
GROUP BY s.run_id, s.rollout_id, s._topic, s._partition
HAVING {ending:String} = '' OR ending = {ending:String} OR startsWith(ending, concat({ending:String}, ':'))
ORDER BY min(s._timestamp) DESC, s._partition DESC, min(s._offset) DESC
LIMIT 50
