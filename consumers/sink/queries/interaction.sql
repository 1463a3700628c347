-- What is known of one answer to a user (interaction, run)?
-- title: Served
-- plot: record
SELECT
    run_id, branch, interaction_id, user_id AS user, arm, propensity, consent, version_min, version_max, replica_id, region,
    finish_reason, prompt_tokens, sampled_tokens, first_token_ms, latency_ms, served_at, _topic, _partition, _offset
FROM interactions
WHERE interaction_id = {interaction:String} AND ({run:String} = '' OR run_id = {run:String})
ORDER BY _offset
LIMIT 1 BY run_id
LIMIT 20
