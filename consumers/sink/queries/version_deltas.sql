-- From which versions does a delta lead to this one, and where do its shards lie?
-- title: Deltas to this version
WITH
    deltas AS
    (
        SELECT run_id, branch, 'delta' AS kind, parent AS base, shards.shard, shards.topic, shards.partition, shards.offsets, shards.n_bytes, shards.uri
        FROM weights_manifests
        WHERE version = toInt64OrNull({version:String}) AND parent IS NOT NULL
        UNION ALL
        SELECT run_id, branch, 'skip-delta', toNullable(base), shards.shard, shards.topic, shards.partition, shards.offsets, shards.n_bytes, shards.uri
        FROM skip_deltas
        WHERE version = toInt64OrNull({version:String})
    )
SELECT DISTINCT
    run_id,
    branch,
    kind,
    base,
    shards.shard AS shard,
    shards.n_bytes AS bytes,
    length(shards.offsets) AS chunks,
    shards.uri AS object,
    shards.topic AS topic,
    shards.partition AS partition,
    if(empty(shards.offsets), NULL, shards.offsets[1]) AS offset
FROM deltas
ARRAY JOIN shards
WHERE ({run:String} = '' OR run_id = {run:String}) AND ({branch:String} = '' OR branch = {branch:String})
ORDER BY run_id, branch, kind, base, shard
LIMIT 500
