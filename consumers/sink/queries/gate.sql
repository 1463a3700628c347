-- What was decided about each version, by whom and with which numbers?
SELECT at, run_id, branch, verdict, version, decided_by, reason, numbers
FROM gate_decisions
ORDER BY run_id, branch, _offset
