-- How did every rollout end: trained once, excluded with a reason, failed, or still open? Held-out tasks are never trained.
-- title: How rollouts ended
-- plot: flow
-- x: ending
-- y: rollouts
-- by: run_id, mode
-- unit: rollouts
-- total: total
-- part: /rollouts
-- Ids and names are hashed to 64 bits, since a million of them as text would be most of the work.
WITH
    read AS
    (
        SELECT one.1 AS mark, one.2 AS ending
        FROM
        (
            SELECT arrayConcat(
                arrayMap((g, p, o) -> (cityHash64(g, p, o), 'trained'), inputs.group_id, inputs.partition, inputs.offset),
                arrayMap((g, p, o, reason) -> (cityHash64(g, p, o), concat('excluded: ', reason)),
                    exclusions.group_id, exclusions.partition, exclusions.offset, exclusions.reason)) AS all
            FROM train_steps
            ORDER BY _offset
            LIMIT 1 BY run_id, step
        )
        ARRAY JOIN all AS one
    ),
    members AS
    (
        SELECT
            arrayJoin(ids) AS id,
            r.ending = 'trained' AS trained,
            r.ending != '' AS ended,
            if(r.ending = '', 0, cityHash64(r.ending)) AS reason,
            trained AND g.task_id IN (SELECT task_id FROM tasks WHERE mode = 'eval') AS held_out
        FROM
        (
            SELECT
                task_id,
                cityHash64(group_id, toInt64(_partition), _offset) AS mark,
                arrayMap(rollout_id -> cityHash64(run_id, rollout_id), members.rollout_id) AS ids
            FROM `groups`
            WHERE {run:String} = '' OR run_id = {run:String}
        ) AS g
        LEFT JOIN read AS r ON r.mark = g.mark
    ),
    endings AS
    (
        SELECT
            id,
            max(of_kind) AS kind,
            max(has_failed) AS failed,
            sum(was_trained) AS trained,
            sum(has_ended) AS ended,
            max(for_reason) AS reason,
            max(was_held_out) AS held_out,
            max(in_group) AS grouped
        FROM
        (
            SELECT
                cityHash64(run_id, rollout_id) AS id,
                cityHash64(run_id, mode) AS of_kind,
                status = 'failed' AS has_failed,
                0 AS was_trained,
                0 AS has_ended,
                toUInt64(0) AS for_reason,
                0 AS was_held_out,
                0 AS in_group
            FROM rollouts
            WHERE {run:String} = '' OR run_id = {run:String}
            UNION ALL
            SELECT id, toUInt64(0), 0, trained, ended, reason, held_out, 1
            FROM members
        )
        GROUP BY id
        HAVING kind != 0
    ),
    counted AS
    (
        SELECT
            kind,
            multiIf(ended > 1, 1, ended = 1 AND reason != cityHash64('trained'), 2, failed, 3, ended = 1, 2, grouped, 4, 5) AS how,
            if(how = 2, reason, 0) AS why,
            count() AS rollouts,
            countIf(trained > 1) AS trained_twice,
            countIf(held_out) AS held_out_trained
        FROM endings
        GROUP BY kind, how, why
    )
SELECT
    k.run_id AS run_id,
    k.mode AS mode,
    multiIf(
        c.how = 1, 'more than one ending',
        c.how = 2, n.ending,
        c.how = 3, 'failed',
        c.how = 4, 'open: in a group',
        'open: in no group') AS ending,
    c.rollouts AS rollouts,
    c.trained_twice AS trained_twice,
    c.held_out_trained AS held_out_trained,
    k.total AS total
FROM counted AS c
INNER JOIN
(
    SELECT run_id, mode, cityHash64(run_id, mode) AS kind, uniqExact(cityHash64(run_id, rollout_id)) AS total
    FROM rollouts
    WHERE {run:String} = '' OR run_id = {run:String}
    GROUP BY run_id, mode
) AS k ON k.kind = c.kind
LEFT JOIN (SELECT DISTINCT ending, cityHash64(ending) AS why FROM read) AS n ON n.why = c.why
ORDER BY run_id, mode, ending
