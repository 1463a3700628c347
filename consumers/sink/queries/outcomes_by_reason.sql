-- How did every interaction that was served end: with one reward, with one exclusion and its reason, or not yet?
-- title: How interactions ended, by arm
-- plot: flow
-- x: ending
-- y: interactions
-- by: run_id, arm
-- unit: interactions
-- total: total
-- part: /users
WITH
    answers AS (SELECT * FROM interactions WHERE {run:String} = '' OR run_id = {run:String} ORDER BY _offset LIMIT 1 BY run_id, interaction_id),
    ends AS
    (
        SELECT
            run_id,
            interaction_id,
            argMinIf(exclusion, _offset, revision = 0) AS why,
            uniqExactIf((reward, exclusion), revision = 0) AS endings,
            max(revision) AS revisions,
            any(arm) AS in_arm
        FROM outcomes
        WHERE {run:String} = '' OR run_id = {run:String}
        GROUP BY run_id, interaction_id
    )
SELECT
    coalesce(nullIf(a.run_id, ''), e.run_id) AS run_id,
    coalesce(nullIf(a.arm, ''), e.in_arm) AS arm,
    multiIf(
        a.interaction_id = '', 'outcome of an interaction that is gone',
        e.endings = 0, 'open',
        e.why != '', concat('excluded: ', e.why),
        'reward') AS ending,
    count() AS interactions,
    sum(interactions) OVER (PARTITION BY run_id, arm) AS total,
    countIf(e.endings > 1) AS ended_twice,
    countIf(e.revisions > 0) AS corrected
FROM answers AS a
FULL OUTER JOIN ends AS e ON e.run_id = a.run_id AND e.interaction_id = a.interaction_id
GROUP BY run_id, arm, ending
ORDER BY run_id, arm, ending
