-- How did the evidence of each comparison grow: the mean reward of each arm's interactions up to each moment?
-- title: Evidence as it grew
-- width: full
-- plot: line
-- x: at
-- y: mean_reward
-- by: trial
-- unit: mean reward so far
-- Of the interactions that the gate compares: served in the comparison, by one version alone, the candidate or the
-- baseline. The gate's own evidence, which it computes by blocks of users, is in the numbers of its decisions.
WITH
    decisions AS
    (
        SELECT run_id, branch, verdict, assumeNotNull(version) AS version, numbers, at
        FROM gate_decisions
        WHERE version IS NOT NULL
        ORDER BY _offset
        LIMIT 1 BY run_id, branch, verdict, version, at
    ),
    trials AS
    (
        SELECT
            b.run_id AS run_id,
            b.branch AS branch,
            b.version AS candidate,
            toInt64(b.numbers['baseline']) AS baseline,
            b.at AS began,
            minIf(e.at, e.at > b.at AND e.verdict IN ('promote', 'reject', 'hold', 'roll_back')) AS concluded,
            if(concluded > began, concluded, now64(6)) AS ended
        FROM decisions AS b
        INNER JOIN decisions AS e ON e.run_id = b.run_id AND e.branch = b.branch
        WHERE b.verdict = 'canary' AND b.numbers['share'] > 0
        GROUP BY run_id, branch, candidate, baseline, began
    ),
    ends AS
    (
        SELECT run_id, branch, arm, version_min, version_max, reward, served_at, closed_at
        FROM outcomes
        WHERE reward IS NOT NULL AND arm IN ('canary', 'stable')
        ORDER BY revision DESC, _offset
        LIMIT 1 BY run_id, interaction_id
    ),
    compared AS
    (
        SELECT
            o.run_id AS run_id,
            t.candidate AS candidate,
            t.began AS began,
            o.arm AS arm,
            o.reward AS reward,
            greatest(intDiv(dateDiff('microsecond', t.began, t.ended), 40), 1) AS width,
            fromUnixTimestamp64Micro(intDiv(toUnixTimestamp64Micro(o.closed_at), width) * width + width, 'UTC') AS at
        FROM ends AS o
        ASOF INNER JOIN trials AS t ON t.run_id = o.run_id AND t.branch = o.branch AND o.served_at >= t.began
        WHERE o.closed_at <= t.ended AND o.version_min = o.version_max
            AND o.version_max = if(o.arm = 'canary', t.candidate, t.baseline)
    )
SELECT
    run_id,
    concat(toString(candidate), ' ', arm) AS trial,
    at,
    sum(count()) OVER so_far AS interactions,
    round(sum(sum(reward)) OVER so_far / interactions, 4) AS mean_reward
FROM compared
GROUP BY run_id, candidate, began, arm, at
WINDOW so_far AS (PARTITION BY run_id, candidate, began, arm ORDER BY at)
ORDER BY run_id, candidate, at, arm
