-- How far behind the trainer were the tokens of one step?
-- title: Policy lag
-- plot: bars
-- x: policy_lag
-- y: tokens
-- unit: tokens
SELECT run_id, lag.lag AS policy_lag, lag.tokens AS tokens
FROM
(
    SELECT *
    FROM train_steps
    WHERE step = toInt64OrNull({step:String}) AND ({run:String} = '' OR run_id = {run:String})
    ORDER BY _offset
    LIMIT 1
)
ARRAY JOIN lag
ORDER BY policy_lag
