-- What was the greatest policy lag of a trained token, what is the bound, and what was excluded to keep it?
SELECT
    run_id,
    max(arrayMax(arrayPushFront(lag.lag, 0))) AS max_policy_lag,
    anyLastIf(toNullable(metrics['policy_lag_bound']), mapContains(metrics, 'policy_lag_bound')) AS bound,
    argMax(step, arrayMax(arrayPushFront(lag.lag, 0))) AS at_step,
    round(sum(arraySum((l, n) -> l * n, lag.lag, lag.tokens)) / nullIf(sum(arraySum(lag.tokens)), 0), 3) AS mean_policy_lag,
    sum(arrayCount(reason -> reason = 'stale', exclusions.reason)) AS groups_excluded_as_stale
FROM (SELECT * FROM train_steps ORDER BY _offset LIMIT 1 BY run_id, step)
GROUP BY run_id
ORDER BY run_id
