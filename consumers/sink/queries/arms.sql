-- What were the reward, the latency and the guardrail measures of each arm, by version?
-- title: Arms
-- records: interaction_list
SELECT
    run_id,
    branch,
    arm,
    version_max AS version,
    count() AS interactions,
    countIf(e.reward IS NOT NULL) AS rewards,
    round(avg(e.reward), 4) AS reward,
    round(stddevSamp(e.reward) / nullIf(sqrt(rewards), 0), 4) AS standard_error,
    round(quantile(0.5)(e.latency_ms), 1) AS latency_ms_p50,
    round(quantile(0.95)(e.latency_ms), 1) AS latency_ms_p95,
    round(avg(sampled_tokens), 1) AS tokens,
    round(avgOrNullIf(observed['edit_made'], mapContains(observed, 'edit_made')), 4) AS edit_rate,
    round(avgOrNullIf(observed['question_asked'], mapContains(observed, 'question_asked')), 4) AS question_rate,
    round(avgOrNullIf(observed['tool_error'], mapContains(observed, 'tool_error')), 4) AS tool_error_rate
FROM (SELECT * FROM outcomes WHERE {run:String} = '' OR run_id = {run:String} ORDER BY revision DESC, _offset LIMIT 1 BY run_id, interaction_id) AS e
GROUP BY run_id, branch, arm, version
ORDER BY run_id, branch, version, arm
