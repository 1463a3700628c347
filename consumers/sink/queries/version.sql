-- What is one weight version: its parent, its size, its step, its anchor and its position in the log?
-- title: The version
-- plot: record
WITH
    -- insert: version_record
SELECT
    run_id,
    branch,
    version,
    parent,
    if(step > 0, toNullable(step), NULL) AS step,
    learning_rate,
    n_elements,
    n_changed,
    round(n_changed / nullIf(n_elements, 0), 5) AS density,
    delta_bytes,
    length(tensors.name) AS tensors,
    fingerprint,
    anchor_uri,
    anchor_n_bytes AS anchor_bytes,
    trained_at,
    published_at,
    incarnation,
    _topic AS topic,
    _partition AS partition,
    _offset AS offset
FROM version_record
