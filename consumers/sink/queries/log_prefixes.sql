-- Which topic prefixes do the tables hold? A replay of a stage writes under a prefix of its own.
-- title: Topic prefixes
SELECT
    extract(_topic, concat(
        '^(.*?)(?:documents|tasks|rollouts(?:\\.progress)?|groups|weights\\.(?:deltas|manifests|acks)|train\\.(?:steps|mismatch)|staleness',
        '|gate\\.decisions|interactions|feedback|outcomes|online-batches|user\\.requests)(?:\\.dlq)?$')) AS prefix,
    uniqExact(_topic) AS topics,
    sum(next) AS read_up_to
FROM (SELECT _topic, _partition, max(next_offset) AS next FROM sink_watermarks GROUP BY _topic, _partition)
GROUP BY prefix
ORDER BY prefix
