-- Which offsets of each partition do the tables hold, and up to where have they read it (topic)?
-- title: Partitions
-- records: log_records
WITH
    -- insert: every_record
    counted AS
    (
        SELECT
            _topic,
            _partition,
            count() AS n,
            min(_offset) AS first,
            max(_offset) AS last,
            max(_timestamp) AS latest
        FROM held
        WHERE {topic:String} = '' OR _topic = {topic:String}
        GROUP BY _topic, _partition
    ),
    marks AS
    (
        SELECT _topic, _partition, max(next_offset) AS next
        FROM sink_watermarks
        WHERE {topic:String} = '' OR _topic = {topic:String}
        GROUP BY _topic, _partition
    )
SELECT
    _topic AS topic,
    _partition AS partition,
    n AS rows,
    if(n = 0, NULL, first) AS first_offset,
    if(n = 0, NULL, last) AS last_offset,
    next AS read_up_to,
    greatest(if(n = 0, 0, next - first - toInt64(n)), 0) AS without_row,
    if(n = 0, NULL, latest) AS newest_record
FROM counted
FULL OUTER JOIN marks USING (_topic, _partition)
ORDER BY topic, partition
