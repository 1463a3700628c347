-- How large was each delta beside the bytes of its positions alone, of plain index and value, and of the whole version?
-- title: Delta bytes beside bounds
-- width: full
-- plot: line
-- x: version
-- y: delta_bytes, positions_bytes, plain_bytes
-- by: branch
-- unit: bytes
-- positions_bytes: the least for which elements changed, where each is equally likely to (N h(p), `kernels.bounds`); the
-- codec may go below, since it knows the old exponents. plain_bytes: 4 bytes of index and 2 of value for each change.
SELECT
    run_id,
    branch,
    version,
    delta_bytes,
    toInt64(round(-(n_changed * log2(n_changed / n_elements) + if(n_changed = n_elements, 0,
        (n_elements - n_changed) * log2(1 - n_changed / n_elements))) / 8)) AS positions_bytes,
    6 * n_changed AS plain_bytes,
    2 * n_elements AS whole_bytes,
    _topic AS topic,
    _partition AS partition,
    _offset AS offset
FROM
(
    SELECT *
    FROM weights_manifests
    WHERE parent IS NOT NULL AND n_changed > 0 AND ({run:String} = '' OR run_id = {run:String})
    ORDER BY _offset
    LIMIT 1 BY run_id, branch, version
)
ORDER BY run_id, branch, version
