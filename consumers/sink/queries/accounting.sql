-- How did every rollout end: trained once, evaluated, excluded with a reason, failed, or still open? Held-out tasks are never trained.
-- title: How rollouts ended
-- plot: flow
-- x: ending
-- y: rollouts
-- by: run_id, mode
-- unit: rollouts
-- total: total
-- part: /rollouts
-- A held-out rollout in a group is evaluated, with or without the trainer's exclusion of it (`eval`).
-- A group is `whole` if each of its records names exactly the rollouts that the table has of it, by number and sum of
-- hashed ids; it is counted at once. `of_groups` is a value, and so computed once: the endings of whole groups, and the
-- keys of all other groups. The rollouts of these, and of them alone, are counted one by one. `total` is counted apart
-- from the endings, so that it shows where they lack one.
WITH
    read AS
    (
        SELECT one.1 AS mark, one.2 AS ending
        FROM
        (
            SELECT arrayConcat(
                arrayMap((g, p, o) -> (cityHash64(g, p, o), 'trained'), inputs.group_id, inputs.partition, inputs.offset),
                arrayFilter(one -> one.2 != 'excluded: eval', arrayMap(
                    (g, p, o, reason) -> (cityHash64(g, p, o), concat('excluded: ', reason)),
                    exclusions.group_id, exclusions.partition, exclusions.offset, exclusions.reason))) AS all
            FROM train_steps
            ORDER BY _offset
            LIMIT 1 BY run_id, step
        )
        ARRAY JOIN all AS one
    ),
    records AS
    (
        SELECT
            g.key AS key,
            g.ids AS ids,
            r.ending AS ending,
            r.ending != '' AS ended,
            r.ending = 'trained' AS trained,
            trained AND g.task_id IN (SELECT task_id FROM tasks WHERE mode = 'eval') AS held_out
        FROM
        (
            SELECT
                task_id,
                cityHash64(run_id, group_id) AS key,
                cityHash64(group_id, toInt64(_partition), _offset) AS mark,
                arrayMap(rollout_id -> cityHash64(rollout_id), members.rollout_id) AS ids
            FROM `groups`
            WHERE {run:String} = '' OR run_id = {run:String}
        ) AS g
        LEFT JOIN read AS r ON r.mark = g.mark
    ),
    (
        SELECT groupArray((run_id, mode, how_often, ending, trained_twice, held_out, completed, failed, keys))
        FROM
        (
            SELECT
                o.run AS run_id,
                o.of_mode AS mode,
                o.completed + o.failed = r.fewest AND r.fewest = r.most AND o.ids = r.least AND r.least = r.greatest
                    AND (o.of_eval = 0 OR o.of_eval = r.most) AS whole,
                r.ended AS how_often,
                r.ending AS ending,
                r.trained > 1 AS trained_twice,
                r.held_out AS held_out,
                sumIf(o.completed, whole) AS completed,
                sumIf(o.failed, whole) AS failed,
                groupArrayIf(o.key, NOT whole) AS keys
            FROM
            (
                SELECT
                    cityHash64(run_id, group_id) AS key,
                    any(run_id) AS run,
                    any(mode) AS of_mode,
                    countIf(mode = 'eval') AS of_eval,
                    countIf(status = 'completed') AS completed,
                    countIf(status = 'failed') AS failed,
                    sum(cityHash64(rollout_id)) AS ids
                FROM rollouts
                WHERE {run:String} = '' OR run_id = {run:String}
                GROUP BY key
            ) AS o
            LEFT JOIN
            (
                SELECT
                    key,
                    sum(ended) AS ended,
                    sum(trained) AS trained,
                    max(ending) AS ending,
                    max(held_out) AS held_out,
                    min(arrayUniq(ids)) AS fewest,
                    max(length(ids)) AS most,
                    min(arraySum(ids)) AS least,
                    max(arraySum(ids)) AS greatest
                FROM records
                GROUP BY key
            ) AS r ON r.key = o.key
            GROUP BY run_id, mode, whole, how_often, ending, trained_twice, held_out
        )
    ) AS of_groups,
    arrayFlatten(arrayMap(one -> one.9, of_groups)) AS others,
    counted AS
    (
        SELECT
            one.1 AS run_id,
            toString(one.2) AS mode,
            one.3 AS ended,
            one.4 AS ending,
            one.5 AS trained_twice,
            one.6 AS held_out,
            true AS grouped,
            has_failed AS failed,
            n AS rollouts
        FROM (SELECT arrayJoin(of_groups) AS one)
        ARRAY JOIN [false, true] AS has_failed, [one.7, one.8] AS n
        UNION ALL
        SELECT
            max(run),
            max(of_mode) AS mode,
            sum(has_ended),
            max(how),
            sum(was_trained) > 1,
            max(was_held_out),
            max(in_group),
            max(has_failed),
            1
        FROM
        (
            SELECT
                cityHash64(rollout_id) AS id,
                run_id AS run,
                toString(mode) AS of_mode,
                status = 'failed' AS has_failed,
                cityHash64(run_id, group_id) AS key,
                0 AS has_ended,
                0 AS was_trained,
                '' AS how,
                false AS was_held_out,
                false AS in_group
            FROM rollouts
            WHERE notEmpty(others) AND ({run:String} = '' OR run_id = {run:String}) AND key IN (SELECT arrayJoin(others))
            UNION ALL
            SELECT arrayJoin(ids), '', '', false, key, ended, trained, ending, held_out, true
            FROM records
            WHERE notEmpty(others) AND key IN (SELECT arrayJoin(others))
        )
        GROUP BY key, id
        HAVING mode != ''
    )
SELECT
    c.run_id AS run_id,
    c.mode AS mode,
    multiIf(
        c.ended > 1, 'more than one ending',
        c.ended = 1 AND c.ending != 'trained', c.ending,
        c.failed, 'failed',
        c.ended = 1, 'trained',
        c.grouped, if(c.mode = 'eval', 'evaluated', 'open: in a group'),
        'open: in no group') AS ending,
    sum(c.rollouts) AS rollouts,
    sumIf(c.rollouts, c.trained_twice) AS trained_twice,
    sumIf(c.rollouts, c.held_out) AS held_out_trained,
    any(w.whole) AS total
FROM counted AS c
LEFT JOIN
(
    SELECT run_id AS run, toString(mode) AS of_mode, uniqExact(cityHash64(rollout_id)) AS whole
    FROM rollouts
    WHERE {run:String} = '' OR run_id = {run:String}
    GROUP BY run_id, mode
) AS w ON w.run = c.run_id AND w.of_mode = c.mode
GROUP BY run_id, mode, ending
HAVING rollouts > 0
ORDER BY run_id, mode, ending
