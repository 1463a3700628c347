-- Which tensors does a weight version hold, and what are their fingerprints?
-- title: Tensors
SELECT
    run_id,
    branch,
    tensors.name AS tensor,
    tensors.dtype AS dtype,
    tensors.shape AS shape,
    tensors.fingerprint AS fingerprint
FROM
(
    SELECT *
    FROM
    (
        SELECT *
        FROM weights_manifests
        WHERE version = toInt64OrNull({version:String})
            AND ({run:String} = '' OR run_id = {run:String})
            AND ({branch:String} = '' OR branch = {branch:String})
        ORDER BY _offset
        LIMIT 1 BY run_id, branch
    )
    ORDER BY _offset DESC
    LIMIT 1
)
ARRAY JOIN tensors
ORDER BY tensor
