-- How do the newest 60 versions of each branch hang together: deltas, anchors, skip-deltas, forks and decisions?
-- title: Version graph
-- plot: graph
-- `before` may be empty: a version, and the 60 before it are shown.
WITH
    versions AS
    (
        SELECT run_id, branch, incarnation, version, parent, fingerprint, delta_bytes, anchor_uri IS NOT NULL AS anchor
        FROM weights_manifests
        WHERE ({run:String} = '' OR run_id = {run:String})
            AND ({before:String} = '' OR version < toInt64OrNull({before:String}))
        ORDER BY _offset
        LIMIT 1 BY run_id, branch, incarnation, version
    )
SELECT *
FROM
(
    SELECT run_id, branch, incarnation, 'version' AS kind, version, parent AS base, fingerprint, delta_bytes AS bytes, anchor, '' AS reason, 0 AS place
    FROM (SELECT * FROM versions ORDER BY version DESC LIMIT 60 BY run_id, branch, incarnation)
    UNION ALL
    SELECT run_id, branch, '' AS incarnation, 'skip-delta', version, toNullable(base), '', n_bytes, false, '', _offset
    FROM
    (
        SELECT *
        FROM skip_deltas
        WHERE ({run:String} = '' OR run_id = {run:String})
            AND ({before:String} = '' OR version < toInt64OrNull({before:String}))
        ORDER BY version DESC
        LIMIT 60 BY run_id, branch
    )
    UNION ALL
    SELECT run_id, branch, '' AS incarnation, toString(verdict), ifNull(version, -1), NULL, '', 0, false, reason, _offset
    FROM
    (
        SELECT *
        FROM gate_decisions
        WHERE ({run:String} = '' OR run_id = {run:String})
            AND ({before:String} = '' OR version < toInt64OrNull({before:String}))
        ORDER BY _offset DESC
        LIMIT 400 BY run_id, branch
    )
)
ORDER BY run_id, branch, incarnation, kind, version, place
