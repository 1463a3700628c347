-- How many versions behind the newest one does each region serve?
SELECT
    run_id,
    region,
    uniqExact(replica_id) AS replicas,
    argMax(version, _offset) AS last_serving,
    argMax(lag.lag, _offset) AS last_lag,
    round(avg(lag.lag), 2) AS mean_lag,
    max(lag.lag) AS max_lag,
    max(at) AS last_seen
FROM staleness
ARRAY JOIN lag
WHERE stage = 'serve'
GROUP BY run_id, region
ORDER BY run_id, region
