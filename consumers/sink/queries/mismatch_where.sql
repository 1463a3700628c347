-- On which tokens are sampler and trainer apart: by environment, replica, lag, position, turn, place in it, probability?
-- title: Mismatch by kind of token
SELECT
    run_id,
    slices.part AS part,
    slices.dimension AS dimension,
    slices.value AS value,
    sum(slices.tokens) AS tokens,
    sum(slices.k1 * slices.tokens) / tokens AS mean_k1,
    sum(slices.k3 * slices.tokens) / tokens AS mean_k3,
    sum(slices.beyond_2 * slices.tokens) / tokens AS mean_beyond_2,
    quantile(0.5)(slices.p99) AS median_p99,
    max(slices.max) AS max_abs_dlogp,
    round(sum(slices.cut) / tokens, 4) AS cut
FROM (SELECT * FROM train_mismatch ORDER BY _offset LIMIT 1 BY run_id, step)
ARRAY JOIN slices
GROUP BY run_id, part, dimension, value
ORDER BY run_id, part, dimension, value
