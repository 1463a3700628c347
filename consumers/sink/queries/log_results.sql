-- How far into its input do the results of each reader reach, and how many records came after that?
-- title: How far the results of each reader reach
-- What came after is waiting, or has gone into nothing yet: the rollouts of an open group, an answer within its horizon.
-- `named` is a value, and so computed once: reader, topic, partition and the highest offset that a result names.
WITH
    (
        SELECT groupArray((reader, topic, part, reached))
        FROM
        (
            SELECT
                'group assembly' AS reader,
                concat(substring(log, 1, length(log) - length('groups')), one.1) AS topic,
                one.2 AS part,
                max(arrayMax((t, p, o) -> if((t, p) = one, o, -1), topics, parts, offsets)) AS reached
            FROM (SELECT _topic AS log, members.topic AS topics, members.partition AS parts, members.offset AS offsets FROM `groups`)
            ARRAY JOIN arrayDistinct(arrayZip(topics, parts)) AS one
            GROUP BY topic, part
            UNION ALL
            SELECT
                'feedback join',
                concat(substring(_topic, 1, length(_topic) - length('outcomes')), outcomes.topic) AS topic,
                outcomes.partition AS part,
                max(outcomes.offset)
            FROM outcomes
            GROUP BY topic, part
            UNION ALL
            SELECT
                'trainer',
                concat(substring(_topic, 1, length(_topic) - length('train.steps')), input.1) AS topic,
                input.2 AS part,
                max(input.3)
            FROM
            (
                SELECT
                    _topic,
                    arrayJoin(arrayConcat(
                        arrayZip(inputs.topic, inputs.partition, inputs.offset),
                        arrayZip(exclusions.topic, exclusions.partition, exclusions.offset))) AS input
                FROM train_steps
            )
            WHERE input.1 IN ('groups', 'online-batches')
            GROUP BY topic, part
        )
    ) AS named,
    held AS
    (
        SELECT _topic, _partition, groupArray(_offset) AS offsets, groupArray(_timestamp) AS times
        FROM
        (
            SELECT _topic, _partition, _offset, _timestamp FROM rollouts
            UNION ALL
            SELECT _topic, _partition, _offset, _timestamp FROM interactions
            UNION ALL
            SELECT _topic, _partition, _offset, _timestamp FROM `groups`
            UNION ALL
            SELECT _topic, _partition, _offset, _timestamp FROM online_batches
        )
        GROUP BY _topic, _partition
    )
SELECT
    r.reader AS reader,
    r.topic AS topic,
    sum(length(h.offsets)) AS records,
    sum(arrayCount(offset -> offset > n.reached, h.offsets)) AS after,
    max(arrayMax(arrayMap((offset, time) -> if(offset <= n.reached, time, toDateTime64(0, 3, 'UTC')), h.offsets, h.times))) AS reached,
    max(arrayMax(h.times)) AS newest_record
FROM held AS h
INNER JOIN (SELECT DISTINCT one.1 AS reader, one.2 AS topic FROM (SELECT arrayJoin(named) AS one)) AS r ON r.topic = h._topic
LEFT JOIN
(
    SELECT one.1 AS reader, one.2 AS topic, one.3 AS part, toNullable(one.4) AS reached
    FROM (SELECT arrayJoin(named) AS one)
) AS n ON n.reader = r.reader AND n.topic = h._topic AND n.part = toInt64(h._partition)
GROUP BY reader, topic
ORDER BY reader, topic
