-- Which rollouts are there, newest first, and how did each end?
-- title: Rollouts
-- Every parameter may be empty. `ending` is one of the query `accounting`, or the part before its colon; `text` stands in
-- the task, in the reason of a failure, or is the id; `tokens` is a JSON list of lists of token ids, one of which stands
-- in the rollout: looked for in the newest 2,000 that meet the other conditions; `before` is the `place` of a rollout.
-- `found` and `of_groups` are values, and so computed once: further columns are read of these rollouts alone. Places in
-- the log are single numbers, of rollouts (`here`) as of groups (`mark`): sets of a million numbers are quick.
WITH
    splitByChar(' ', {before:String}) AS reached,
    members AS
    (
        SELECT
            group_id,
            cityHash64(group_id, toInt64(_partition), _offset) AS mark,
            arrayMap((p, o) -> o * 65536 + p, members.partition, members.offset) AS places
        FROM `groups`
    ),
    read AS
    (
        SELECT step, version, one.1 AS group_id, cityHash64(one.1, one.2, one.3) AS mark, one.4 AS reason
        FROM
        (
            SELECT
                step,
                version,
                arrayConcat(
                    arrayZip(inputs.group_id, inputs.partition, inputs.offset, arrayWithConstant(length(inputs.group_id), '')),
                    arrayZip(exclusions.group_id, exclusions.partition, exclusions.offset, exclusions.reason)) AS all
            FROM train_steps
            ORDER BY _offset
            LIMIT 1 BY run_id, step
        )
        ARRAY JOIN all AS one
        WHERE reason != 'eval'
    ),
    met AS
    (
        SELECT _topic, _partition, _offset, _timestamp, rollout_id, task_id, failure
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
                WHERE mark IN (SELECT mark FROM read WHERE step = toInt64OrZero({step:String}) AND reason = '')
            ))
            -- A failed rollout is failed or excluded.
            AND ({ending:String} = '' OR startsWith({ending:String}, 'excluded') OR {ending:String} = 'more than one ending'
                OR (status = 'failed') = ({ending:String} = 'failed'))
            -- A held-out rollout in a group is evaluated, not open.
            AND ({ending:String} != 'evaluated' OR mode = 'eval')
            AND ({ending:String} NOT IN ('open', 'open: in a group') OR mode != 'eval'
                OR _offset * 65536 + _partition NOT IN (SELECT arrayJoin(places) FROM members))
            -- Places of groups, and whether the rollout must be in one of them or in none. The rows below are exact.
            AND ({ending:String} != 'more than one ending' OR _offset * 65536 + _partition IN
            (
                SELECT arrayJoin(m.places) AS one
                FROM members AS m
                INNER JOIN read AS r ON r.mark = m.mark
                GROUP BY one
                HAVING count() > 1
            ))
            AND ({ending:String} IN ('', 'more than one ending')
                OR ({ending:String} NOT IN ('failed', 'open', 'open: in no group')) =
                (_offset * 65536 + _partition IN
            (
                SELECT arrayJoin(places)
                FROM members
                WHERE {ending:String} = 'open: in no group' OR ({ending:String} NOT IN ('open: in a group', 'evaluated')) = (mark IN
                (
                    SELECT mark
                    FROM read
                    WHERE multiIf(
                        {ending:String} = 'trained', reason = '',
                        {ending:String} IN ('failed', 'excluded'), reason != '',
                        startsWith({ending:String}, 'excluded: '), reason = substring({ending:String}, 11),
                        true)
                ))
            )))
    ),
    (
        SELECT groupArray((_topic, _partition, _offset))
        FROM
        (
            SELECT _topic, _partition, _offset
            FROM met
            WHERE {text:String} = '' OR rollout_id = {text:String} OR positionCaseInsensitive(failure, {text:String}) > 0
                OR task_id IN (SELECT task_id FROM tasks WHERE positionCaseInsensitive(payload, {text:String}) > 0)
            ORDER BY _timestamp DESC, _partition DESC, _offset DESC
            LIMIT 50
            UNION ALL
            SELECT _topic, _partition, _offset
            FROM rollouts
            WHERE {tokens:String} NOT IN ('', '[]')
                AND (_topic, _partition, _offset) IN
                    (SELECT _topic, _partition, _offset FROM met ORDER BY _timestamp DESC LIMIT 2000)
                AND arrayExists(ids -> hasSubstr(token_ids, ids), JSONExtract({tokens:String}, 'Array(Array(UInt32))'))
            ORDER BY _timestamp DESC, _partition DESC, _offset DESC
            LIMIT 50
        )
    ) AS found,
    shown AS
    (
        SELECT
            run_id, rollout_id, group_id, environment, mode, status, reward, success, version_min, version_max, turns,
            sampled_tokens, finished_at, _topic, _partition, _offset, _timestamp, _offset * 65536 + _partition AS here
        FROM rollouts
        WHERE (_topic, _partition, _offset) IN (SELECT one.1, one.2, one.3 FROM (SELECT arrayJoin(found) AS one))
    ),
    (SELECT groupUniqArray(group_id) FROM shown) AS of_groups
SELECT
    s.rollout_id AS rollout_id,
    any(s.environment) AS environment,
    any(s.mode) AS mode,
    multiIf(
        countIf(has(m.places, s.here) AND r.mark != 0) > 1, 'more than one ending',
        anyIf(r.reason, has(m.places, s.here)) != '', concat('excluded: ', anyIf(r.reason, has(m.places, s.here))),
        any(s.status) = 'failed', 'failed',
        countIf(has(m.places, s.here) AND r.mark != 0) = 1, 'trained',
        countIf(has(m.places, s.here)) > 0, if(any(s.mode) = 'eval', 'evaluated', 'open: in a group'),
        'open: in no group') AS ending,
    anyIf(toNullable(r.step), has(m.places, s.here) AND r.mark != 0 AND r.reason = '') AS step,
    anyIf(toNullable(r.version), has(m.places, s.here) AND r.mark != 0 AND r.reason = '') AS version,
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
LEFT JOIN (SELECT * FROM members WHERE group_id IN (SELECT arrayJoin(of_groups))) AS m ON m.group_id = s.group_id
LEFT JOIN (SELECT * FROM read WHERE group_id IN (SELECT arrayJoin(of_groups))) AS r ON r.mark = m.mark
GROUP BY s.run_id, s.rollout_id, s._topic, s._partition
HAVING {ending:String} = '' OR ending = {ending:String} OR startsWith(ending, concat({ending:String}, ':'))
ORDER BY min(s._timestamp) DESC, s._partition DESC, min(s._offset) DESC
LIMIT 50
