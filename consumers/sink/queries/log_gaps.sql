-- Which records did the log delete before the tables had read them?
-- title: Retention gaps
SELECT _topic AS topic, _partition AS partition, first_offset, end_offset, end_offset - first_offset AS offsets, found_at
FROM sink_gaps FINAL
ORDER BY found_at DESC, topic, partition
LIMIT 200
