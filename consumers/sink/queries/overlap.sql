-- For which share of the trainer's working time were replicas sampling too?
WITH
    steps AS
    (
        SELECT run_id, toUnixTimestamp64Micro(started_at) AS began, toUnixTimestamp64Micro(finished_at) AS ended
        FROM train_steps
        ORDER BY _offset
        LIMIT 1 BY run_id, step
    ),
    sampling AS
    (
        SELECT run_id, toUnixTimestamp64Micro(started_at) AS began, toUnixTimestamp64Micro(finished_at) AS ended
        FROM rollouts
    ),
    -- insert: busy
    both AS
    (
        SELECT s.run_id AS run_id, sum(greatest(0, least(s.ended, b.ended) - greatest(s.began, b.began))) AS microseconds
        FROM steps AS s
        INNER JOIN busy AS b ON b.run_id = s.run_id
        GROUP BY run_id
    )
SELECT
    t.run_id AS run_id,
    round(t.microseconds / 1e6, 3) AS trainer_busy_s,
    round(b.microseconds / 1e6, 3) AS both_busy_s,
    round(b.microseconds / nullIf(t.microseconds, 0), 4) AS overlap
FROM (SELECT run_id, sum(ended - began) AS microseconds FROM steps GROUP BY run_id) AS t
LEFT JOIN both AS b ON b.run_id = t.run_id
ORDER BY run_id
