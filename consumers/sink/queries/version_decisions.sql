-- What was decided about this version, by whom and why?
-- title: Decisions
SELECT run_id, branch, at, verdict, decided_by, reason, _topic AS topic, _partition AS partition, _offset AS offset
FROM gate_decisions
WHERE version = toInt64OrNull({version:String})
    AND ({run:String} = '' OR run_id = {run:String})
    AND ({branch:String} = '' OR branch = {branch:String})
ORDER BY run_id, branch, offset
LIMIT 500
