-- What was decided about each version, by whom and with which numbers?
-- title: Decisions of the gate and of people
SELECT at, run_id, branch, verdict, version, decided_by, reason, numbers, _topic, _partition, _offset
FROM gate_decisions
ORDER BY run_id, branch, _offset
