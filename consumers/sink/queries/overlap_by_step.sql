-- For which share of each step's working time were replicas sampling too?
-- title: Overlap of sampling and training
-- plot: bars
-- x: step
-- y: overlap
-- unit: share of the step's time
-- records: step
WITH
    sampling AS
    (
        SELECT run_id, toUnixTimestamp64Micro(started_at) AS began, toUnixTimestamp64Micro(finished_at) AS ended
        FROM rollouts
        WHERE {run:String} = '' OR run_id = {run:String}
    ),
    -- insert: busy
    steps AS
    (
        SELECT run_id, step, toUnixTimestamp64Micro(started_at) AS began, toUnixTimestamp64Micro(finished_at) AS ended
        FROM train_steps
        WHERE {run:String} = '' OR run_id = {run:String}
        ORDER BY _offset
        LIMIT 1 BY run_id, step
    )
SELECT
    s.run_id AS run_id,
    s.step AS step,
    round((any(s.ended) - any(s.began)) / 1e6, 3) AS trainer_busy_s,
    round(sum(greatest(0, least(s.ended, b.ended) - greatest(s.began, b.began))) / 1e6, 3) AS both_busy_s,
    round(both_busy_s / nullIf(trainer_busy_s, 0), 4) AS overlap
FROM steps AS s
LEFT JOIN busy AS b ON b.run_id = s.run_id
GROUP BY run_id, step
ORDER BY run_id, step
