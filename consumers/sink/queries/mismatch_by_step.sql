-- How far apart were the logprobs of sampler and trainer in each step, by the numbers in its record?
-- title: Mismatch in the records of the steps
-- plot: line
-- x: step
-- y: k3, mean_abs_dlogp, effective_sample_size
-- unit: k3 (nats), mean |d| (nats), share that counts
-- records: step
SELECT
    run_id,
    step,
    metrics['mismatch/k1'] AS k1,
    metrics['mismatch/k3'] AS k3,
    metrics['mismatch/mean_abs_dlogp'] AS mean_abs_dlogp,
    metrics['mismatch/max_abs_dlogp'] AS max_abs_dlogp,
    metrics['mismatch/ess'] AS effective_sample_size,
    metrics['mismatch/beyond_2'] AS beyond_2
FROM (SELECT run_id, step, metrics FROM train_steps WHERE {run:String} = '' OR run_id = {run:String} ORDER BY _offset LIMIT 1 BY run_id, step)
WHERE mapContains(metrics, 'mismatch/k3')
ORDER BY run_id, step
