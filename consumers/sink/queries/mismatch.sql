-- How far apart were sampler and trainer in each step, with equal weights (engines) and with older ones (lagged)?
-- title: Mismatch of sampler and trainer
-- plot: line
-- x: step
-- y: k3
-- by: part
-- unit: nats
WITH
    parts AS
    (
        SELECT
            run_id,
            step,
            slices.part AS part,
            slices.tokens AS tokens,
            slices.k1 AS k1,
            slices.k3 AS k3,
            slices.p50 AS p50,
            slices.p99 AS p99,
            slices.max AS max,
            slices.beyond_2 AS beyond_2,
            slices.ess AS ess,
            slices.cut AS cut,
            arrayFilter(alarm -> startsWith(alarm, concat(slices.part, '/')), alarms) AS alarms
        FROM (SELECT * FROM train_mismatch WHERE {run:String} = '' OR run_id = {run:String} ORDER BY _offset LIMIT 1 BY run_id, step)
        ARRAY JOIN slices
        WHERE slices.dimension = 'all'
    ),
    engines AS (SELECT run_id, step, k1, k3 FROM parts WHERE part = 'engines')
SELECT
    p.run_id AS run_id,
    p.step AS step,
    p.part AS part,
    p.tokens AS tokens,
    p.k1 AS k1,
    p.k3 AS k3,
    p.p50 AS p50_abs_dlogp,
    p.p99 AS p99_abs_dlogp,
    p.max AS max_abs_dlogp,
    p.beyond_2 AS beyond_2,
    p.ess AS ess,
    round(p.cut / p.tokens, 4) AS cut,
    if(p.part = 'lagged' AND e.run_id != '', p.k3 - e.k3, NULL) AS k3_of_staleness,
    p.alarms AS alarms
FROM parts AS p
LEFT JOIN engines AS e ON e.run_id = p.run_id AND e.step = p.step
ORDER BY run_id, step, part
