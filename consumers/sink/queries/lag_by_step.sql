-- How far behind the trainer were the tokens that each step trained on?
-- title: Policy lag by step
-- plot: heat
-- x: step
-- y: share
-- by: policy_lag
-- unit: share of the step's tokens
-- records: step
WITH
    steps AS
    (
        SELECT run_id, step, tokens, lag.lag, lag.tokens
        FROM train_steps
        WHERE {run:String} = '' OR run_id = {run:String}
        ORDER BY _offset
        LIMIT 1 BY run_id, step
    ),
    most AS (SELECT run_id, arrayMax(arrayFlatten(groupArray(lag.lag))) AS most FROM steps GROUP BY run_id)
SELECT
    s.run_id AS run_id,
    s.step AS step,
    arrayJoin(range(toUInt64(m.most + 1))) AS policy_lag,
    arraySum(arrayFilter((n, l) -> l = policy_lag, s.lag.tokens, s.lag.lag)) AS tokens,
    round(tokens / nullIf(arraySum(s.lag.tokens), 0), 4) AS share
FROM steps AS s
INNER JOIN most AS m ON m.run_id = s.run_id
ORDER BY run_id, step, policy_lag DESC
