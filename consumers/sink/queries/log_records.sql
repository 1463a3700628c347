-- Which records of a topic do the tables hold, newest first (topic, partition, before: an offset)?
-- title: Records
WITH
    -- insert: every_record
    chosen AS
    (
        SELECT *
        FROM held
        WHERE _topic = {topic:String}
            AND ({partition:String} = '' OR _partition = toInt32OrNull({partition:String}))
            AND ({before:String} = '' OR _offset < toInt64OrNull({before:String}))
    )
SELECT _topic, _partition, _offset, _timestamp, if(isValidUTF8(_key), _key, concat('0x', hex(_key))) AS key
FROM chosen
ORDER BY _timestamp DESC, _offset DESC
LIMIT 500
