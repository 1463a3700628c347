-- How far into its input do the results of each reader reach, and how many records came after that?
-- title: How far the results of each reader reach
-- What came after is waiting, or has gone into nothing yet: the rollouts of an open group, an answer within its horizon.
WITH
    named AS
    (
        SELECT
            'group assembly' AS reader,
            concat(substring(_topic, 1, length(_topic) - length('groups')), members.topic) AS topic,
            members.partition AS part,
            max(members.offset) AS reached
        FROM `groups`
        ARRAY JOIN members
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
    ),
    held AS
    (
        SELECT _topic, _partition, _offset, _timestamp FROM rollouts
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM interactions
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM `groups`
        UNION ALL
        SELECT _topic, _partition, _offset, _timestamp FROM online_batches
    ),
    readers AS (SELECT DISTINCT reader, topic FROM named)
SELECT
    r.reader AS reader,
    r.topic AS topic,
    count() AS records,
    countIf(h._offset > n.reached) AS after,
    maxIf(h._timestamp, h._offset <= n.reached) AS reached,
    max(h._timestamp) AS newest_record
FROM held AS h
INNER JOIN readers AS r ON r.topic = h._topic
LEFT JOIN (SELECT reader, topic, part, toNullable(reached) AS reached FROM named) AS n
    ON n.reader = r.reader AND n.topic = h._topic AND n.part = toInt64(h._partition)
GROUP BY reader, topic
ORDER BY reader, topic
