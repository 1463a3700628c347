-- Which task was played in one rollout?
-- title: Task
-- `from` is the first character that is shown, counted from 0; 4,000 are.
SELECT
    task_id,
    substringUTF8(payload, toUInt64OrZero({from:String}) + 1, 4000) AS payload,
    lengthUTF8(t.payload) AS characters,
    seed,
    max_turns,
    issued_version,
    options,
    concat(_topic, ' ', toString(_partition), ' ', toString(_offset)) AS position
FROM tasks AS t
WHERE task_id = {task_id:String} AND ({run:String} = '' OR run_id = {run:String})
ORDER BY _timestamp, _offset
LIMIT 1
