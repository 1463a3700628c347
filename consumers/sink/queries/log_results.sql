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
                max(one.3) AS reached
            FROM
            (
                SELECT _topic AS log, arrayJoin(arrayZip(members.topic, members.partition, members.offset)) AS one
                FROM `groups`
            )
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
    reached AS
    (
        SELECT cityHash64(one.2, one.3) AS mark, toNullable(one.4) AS offset
        FROM (SELECT arrayJoin(named) AS one)
    ),
    held AS
    (
        SELECT
            _topic,
            count() AS records,
            countIf(_offset > n.offset) AS after,
            maxIf(_timestamp, _offset <= n.offset) AS latest,
            max(_timestamp) AS newest
        FROM
        (
            SELECT _topic, _partition, _offset, _timestamp FROM rollouts
            UNION ALL
            SELECT _topic, _partition, _offset, _timestamp FROM interactions
            UNION ALL
            SELECT _topic, _partition, _offset, _timestamp FROM `groups`
            UNION ALL
            SELECT _topic, _partition, _offset, _timestamp FROM online_batches
        ) AS one
        LEFT JOIN reached AS n ON n.mark = cityHash64(_topic, toInt64(_partition))
        GROUP BY _topic
    )
SELECT
    r.reader AS reader,
    r.topic AS topic,
    h.records AS records,
    h.after AS after,
    h.latest AS reached,
    h.newest AS newest_record
FROM held AS h
INNER JOIN (SELECT DISTINCT one.1 AS reader, one.2 AS topic FROM (SELECT arrayJoin(named) AS one)) AS r ON r.topic = h._topic
ORDER BY reader, topic
