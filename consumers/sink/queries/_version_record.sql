    -- The first record of a version counts, as for replicas; of several runs or branches, the newest one is shown.
    version_record AS
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
