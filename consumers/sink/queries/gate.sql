-- What was decided of which version, by whom and on what numbers?
SELECT at, run_id, branch, verdict, version, decided_by, reason, numbers
FROM gate_decisions
ORDER BY run_id, branch, _offset
