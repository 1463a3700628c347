-- How many records of each topic do the tables hold, up to where have they read it, and how many come in?
-- title: Topics
-- records: log_partitions
-- `read_up_to` sums the partitions' next offsets. A position without a row holds the mark of a transaction, a tombstone,
-- or a record that was erased or deleted. `per_second` is of the last minute before the newest record of all.
WITH
    -- insert: every_record
    (SELECT max(_timestamp) FROM held) AS newest,
    counted AS
    (
        SELECT
            _topic,
            _partition,
            count() AS n,
            min(_offset) AS first,
            max(_timestamp) AS latest,
            countIf(_timestamp > newest - INTERVAL 1 MINUTE) AS of_last_minute
        FROM held
        GROUP BY _topic, _partition
    ),
    marks AS (SELECT _topic, _partition, max(next_offset) AS next FROM sink_watermarks GROUP BY _topic, _partition)
SELECT
    _topic AS topic,
    count() AS partitions,
    sum(n) AS rows,
    sum(next) AS read_up_to,
    sum(greatest(if(n = 0, 0, next - first - toInt64(n)), 0)) AS without_row,
    round(sum(of_last_minute) / 60, 2) AS per_second,
    max(if(n = 0, NULL, latest)) AS newest_record
FROM counted
FULL OUTER JOIN marks USING (_topic, _partition)
GROUP BY topic
ORDER BY topic
