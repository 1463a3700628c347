-- Which version did each replica serve over time, how long did each update pause it, and which versions did it refuse?
-- title: Served version and pauses by replica
-- plot: steps
-- x: at
-- y: serving_version, pause_ms
-- by: replica_id
-- unit: version, pause (ms)
SELECT
    run_id,
    replica_id,
    at,
    serving_version,
    version,
    status,
    reason,
    if(status = 'proved', round(pause_ms, 2), NULL) AS pause_ms,
    requests_in_flight,
    _topic AS topic,
    _partition AS partition,
    _offset AS offset
FROM (SELECT * FROM weights_acks WHERE {run:String} = '' OR run_id = {run:String} ORDER BY at DESC LIMIT 2000 BY run_id)
ORDER BY run_id, at, replica_id
