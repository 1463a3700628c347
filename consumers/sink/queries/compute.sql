-- How much did each step compute: sampling, prefilling, training, evaluating, and in vain? TFLOP; no step: not yet in one.
WITH
    steps AS (SELECT * FROM train_steps WHERE metrics['flops/body'] > 0 ORDER BY _offset LIMIT 1 BY run_id, step),
    sizes AS
    (
        SELECT
            run_id,
            any(metrics['flops/body']) AS body,
            any(metrics['flops/head']) AS head,
            any(metrics['flops/pair']) AS pair
        FROM steps
        GROUP BY run_id
    ),
    members AS
    (
        SELECT arrayJoin(members.rollout_id) AS rollout_id, run_id, group_id, toInt64(_partition) AS part, _offset AS place
        FROM `groups`
    ),
    read AS
    (
        SELECT run_id, step, inputs.group_id AS group_id, inputs.partition AS part, inputs.offset AS place, 'trained' AS ending
        FROM steps
        ARRAY JOIN inputs
        UNION ALL
        SELECT run_id, step, exclusions.group_id, exclusions.partition, exclusions.offset, 'excluded'
        FROM steps
        ARRAY JOIN exclusions
    ),
    endings AS
    (
        SELECT m.run_id AS run_id, m.rollout_id AS rollout_id, min(r.step) AS step, max(r.ending) AS ending
        FROM members AS m
        INNER JOIN read AS r ON r.run_id = m.run_id AND r.group_id = m.group_id AND r.part = m.part AND r.place = m.place
        GROUP BY run_id, rollout_id
    ),
    made AS
    (
        SELECT
            run_id,
            rollout_id,
            any(task_id) AS task_id,
            any(status) AS status,
            any(prompt_tokens) AS prompt,
            any(sampled_tokens) AS sampled
        FROM rollouts
        GROUP BY run_id, rollout_id
    ),
    turned AS
    (
        SELECT run_id, rollout_id, any(task_id) AS task_id, sum(tokens) AS sampled, sum(recorded - tokens) AS again
        FROM
        (
            SELECT run_id, rollout_id, turn, any(task_id) AS task_id, argMin(n_tokens, _offset) AS tokens, sum(n_tokens) AS recorded
            FROM turns
            GROUP BY run_id, rollout_id, turn
        )
        GROUP BY run_id, rollout_id
    ),
    played AS
    (
        SELECT
            coalesce(nullIf(m.run_id, ''), t.run_id) AS run_id,
            coalesce(nullIf(m.rollout_id, ''), t.rollout_id) AS rollout_id,
            coalesce(nullIf(m.task_id, ''), t.task_id) AS task_id,
            toString(m.status) AS status,
            toFloat64(m.prompt) AS prompt,
            toFloat64(greatest(m.sampled, t.sampled)) AS sampled,
            toFloat64(t.again) AS again
        FROM made AS m
        FULL OUTER JOIN turned AS t ON t.run_id = m.run_id AND t.rollout_id = m.rollout_id
    ),
    work AS
    (
        SELECT
            p.run_id AS run_id,
            if(e.ending = '', NULL, toNullable(e.step)) AS step,
            multiIf(
                p.task_id IN (SELECT task_id FROM tasks WHERE mode = 'eval'), 'evaluating',
                p.status = 'failed' OR e.ending = 'excluded', 'wasted',
                'used') AS kind,
            2 * (z.body + z.head) * p.sampled
                + z.pair * ((p.prompt + p.sampled) * (p.prompt + p.sampled + 1) - p.prompt * (p.prompt + 1)) / 2 AS to_sample,
            2 * z.body * p.prompt + z.pair * p.prompt * (p.prompt + 1) / 2 AS to_prefill,
            2 * (z.body + z.head) * p.again AS to_repeat
        FROM played AS p
        INNER JOIN sizes AS z ON z.run_id = p.run_id
        LEFT JOIN endings AS e ON e.run_id = p.run_id AND e.rollout_id = p.rollout_id
    ),
    spent AS
    (
        SELECT
            run_id,
            step,
            sumIf(to_sample, kind = 'used') AS sampling,
            sumIf(to_prefill, kind = 'used') AS prefilling,
            0. AS training,
            sumIf(to_sample + to_prefill, kind = 'evaluating') AS evaluating,
            sumIf(to_sample + to_prefill, kind = 'wasted') AS excluded_or_failed,
            sum(to_repeat) AS sampled_again,
            0. AS recomputed,
            0. AS saved
        FROM work
        GROUP BY run_id, step
        UNION ALL
        SELECT
            run_id,
            toNullable(step),
            0.,
            0.,
            metrics['flops/forward'] + metrics['flops/backward'] + metrics['flops/frozen'],
            0.,
            0.,
            0.,
            metrics['flops/recomputed'],
            metrics['flops/saved']
        FROM steps
    )
SELECT
    run_id,
    step,
    round(sum(sampling) / 1e12, 6) AS sampling_tflop,
    round(sum(prefilling) / 1e12, 6) AS prefilling_tflop,
    round(sum(training) / 1e12, 6) AS training_tflop,
    round(sum(evaluating) / 1e12, 6) AS evaluating_tflop,
    round((sum(excluded_or_failed) + sum(sampled_again) + sum(recomputed)) / 1e12, 6) AS wasted_tflop,
    round(sum(excluded_or_failed) / 1e12, 6) AS excluded_or_failed_tflop,
    round(sum(sampled_again) / 1e12, 6) AS sampled_again_tflop,
    round(sum(recomputed) / 1e12, 6) AS recomputed_tflop,
    round(sum(saved) / 1e12, 6) AS saved_tflop,
    round((sum(sampling) + sum(prefilling)) / nullIf(sum(training), 0), 4) AS inference_to_training
FROM spent
GROUP BY run_id, step
ORDER BY run_id, step
