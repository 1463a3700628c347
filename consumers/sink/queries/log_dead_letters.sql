-- Which values could nobody use, why, and what are their bytes?
-- title: Dead letters
-- Bytes that are no text are shown in hexadecimal digits.
SELECT
    _timestamp AS at,
    source_topic,
    source_partition,
    source_offset,
    reason,
    found_by,
    length(value) AS bytes,
    if(isValidUTF8(value), substringUTF8(value, 1, 300), concat('0x', hex(substring(value, 1, 150)))) AS beginning,
    _topic,
    _partition,
    _offset
FROM dead_letters
ORDER BY _timestamp DESC, _offset DESC
LIMIT 1 BY source_topic, source_partition, source_offset
LIMIT 200
