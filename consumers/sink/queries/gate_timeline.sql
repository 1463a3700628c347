-- Which version did each decision speak of, over time, why, and with which evidence?
-- title: Decisions of the gate over time
-- plot: steps
-- x: at
-- y: version
-- by: verdict
-- unit: version
SELECT
    run_id,
    branch,
    at,
    verdict,
    version,
    decided_by,
    reason,
    numbers['share'] AS share,
    if(mapContains(numbers, 'bench/rate'), toNullable(round(numbers['bench/rate'], 4)), NULL) AS bench,
    if(mapContains(numbers, 'baseline_bench/rate'), toNullable(round(numbers['baseline_bench/rate'], 4)), NULL) AS bench_of_baseline,
    if(mapContains(numbers, 'canary/reward'), toNullable(round(numbers['canary/reward'], 4)), NULL) AS canary_reward,
    if(mapContains(numbers, 'stable/reward'), toNullable(round(numbers['stable/reward'], 4)), NULL) AS stable_reward,
    if(mapContains(numbers, 'e_better'), toNullable(round(numbers['e_better'], 4)), NULL) AS e_better,
    if(mapContains(numbers, 'e_not_worse'), toNullable(round(numbers['e_not_worse'], 4)), NULL) AS e_not_worse,
    if(mapContains(numbers, 'e_worse'), toNullable(round(numbers['e_worse'], 4)), NULL) AS e_worse,
    _topic,
    _partition,
    _offset
FROM gate_decisions
WHERE {run:String} = '' OR run_id = {run:String}
ORDER BY run_id, branch, at, _offset
