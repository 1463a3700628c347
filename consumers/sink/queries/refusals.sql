-- Which versions did a replica refuse, why, and what did it serve instead?
-- title: Refused versions
SELECT run_id, replica_id, at, version, serving_version, reason, _topic AS topic, _partition AS partition, _offset AS offset
FROM weights_acks
WHERE status = 'refused' AND ({run:String} = '' OR run_id = {run:String})
ORDER BY run_id, at DESC, replica_id
LIMIT 200 BY run_id
