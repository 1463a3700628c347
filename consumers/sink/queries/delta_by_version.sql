-- How large was each delta, and which share of the elements changed, beside the learning rate of its step?
-- title: Delta bytes and density beside the learning rate
-- plot: line
-- x: version
-- y: delta_bytes, density, learning_rate
-- unit: bytes, share of elements, learning rate
-- records: version
SELECT
    run_id,
    branch,
    version,
    step,
    delta_bytes,
    n_changed / n_elements AS density,
    learning_rate
FROM
(
    SELECT run_id, branch, version, step, parent, delta_bytes, n_changed, n_elements, learning_rate
    FROM weights_manifests
    WHERE {run:String} = '' OR run_id = {run:String}
    ORDER BY _offset
    LIMIT 1 BY run_id, branch, version
)
WHERE parent IS NOT NULL
ORDER BY run_id, branch, version
