-- How many records a second came into each topic, over time?
-- title: Rates
-- width: full
-- plot: heat
-- x: minutes
-- y: per_second
-- by: topic
-- unit: records a second
-- `minutes` are the ends of 60 equal intervals from the first record on, counted from the newest record of all.
WITH
    -- insert: every_record
    (SELECT (min(_timestamp), max(_timestamp)) FROM held) AS ends,
    greatest(dateDiff('millisecond', ends.1, ends.2), 60000) / 60 AS width,
    counted AS
    (
        SELECT _topic, countResample(0, 60, 1)(least(toUInt8(floor(dateDiff('millisecond', ends.1, _timestamp) / width)), 59)) AS counts
        FROM held
        GROUP BY _topic
    )
SELECT _topic AS topic, round((place - 60) * width / 60000, 2) AS minutes, round(1000 * n / width, 3) AS per_second
FROM counted
ARRAY JOIN counts AS n, arrayEnumerate(counts) AS place
ORDER BY minutes, topic
