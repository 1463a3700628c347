-- How often are held-out tasks solved under each weight version? Intervals of 95 % (Wilson); control: shuffled rewards.
-- title: Held-out success by weight version
-- plot: line
-- x: version
-- y: success, control
-- low: success_low, control_low
-- high: success_high, control_high
-- by: run_id
-- unit: share solved
WITH
    1.959964 AS z,
    solved AS
    (
        SELECT
            run_id,
            version_max AS version,
            countIf(status = 'completed') AS finished,
            countIf(status = 'failed') AS failed,
            countIf(success) AS solved
        FROM (SELECT run_id, version_max, status, success FROM rollouts WHERE mode = 'eval' LIMIT 1 BY cityHash64(run_id, rollout_id))
        GROUP BY run_id, version
    ),
    shuffled AS (SELECT DISTINCT run_id FROM `groups` WHERE rewards_shuffled),
    counted AS
    (
        SELECT
            *,
            sumIf(solved, run_id IN shuffled) OVER () AS control_solved,
            sumIf(finished, run_id IN shuffled) OVER () AS control_finished
        FROM solved
    ),
    rated AS
    (
        SELECT
            *,
            nullIf(finished, 0) AS n,
            if(run_id IN shuffled, NULL, nullIf(control_finished, 0)) AS control_n,
            solved / n AS rate,
            control_solved / control_n AS control_rate,
            z * sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) AS half,
            z * sqrt(control_rate * (1 - control_rate) / control_n + z * z / (4 * control_n * control_n)) AS control_half
        FROM counted
    )
SELECT
    r.run_id AS run_id,
    r.version AS version,
    m.step AS step,
    r.finished AS finished,
    r.failed AS failed,
    round(r.rate, 4) AS success,
    round((r.rate + z * z / (2 * r.n) - r.half) / (1 + z * z / r.n), 4) AS success_low,
    round((r.rate + z * z / (2 * r.n) + r.half) / (1 + z * z / r.n), 4) AS success_high,
    round(r.control_rate, 4) AS control,
    round((r.control_rate + z * z / (2 * r.control_n) - r.control_half) / (1 + z * z / r.control_n), 4) AS control_low,
    round((r.control_rate + z * z / (2 * r.control_n) + r.control_half) / (1 + z * z / r.control_n), 4) AS control_high
FROM rated AS r
LEFT JOIN
(
    SELECT run_id, version, any(toNullable(step)) AS step
    FROM weights_manifests
    GROUP BY run_id, version
) AS m ON m.run_id = r.run_id AND m.version = r.version
ORDER BY run_id, version
