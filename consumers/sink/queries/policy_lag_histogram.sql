-- How far behind the trainer were the tokens that it trained on?
-- title: Policy lag of trained tokens
-- plot: bars
-- x: policy_lag
-- y: share
-- unit: share of tokens
SELECT
    run_id,
    lag.lag AS policy_lag,
    sum(lag.tokens) AS tokens,
    round(tokens / sum(tokens) OVER (PARTITION BY run_id), 4) AS share,
    bar(share, 0, 1, 40) AS histogram
FROM (SELECT run_id, lag.lag, lag.tokens FROM train_steps WHERE {run:String} = '' OR run_id = {run:String} ORDER BY _offset LIMIT 1 BY run_id, step)
ARRAY JOIN lag
GROUP BY run_id, policy_lag
ORDER BY run_id, policy_lag
